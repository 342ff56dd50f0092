"""Proposes what no probe has run yet, however little the models expect of it: for a search that has found nothing better so far."""

from __future__ import annotations

from collections.abc import Iterator

from autotune import techniques
from autotune.proposers.cost_model import CostModel
from autotune.records.batch_plan import BATCH_KEYS
from autotune.records.config import Choice, Config
from autotune.records.trial import Proposal
from autotune.study.history import History


class Untried:
    """Proposes the best config with each choice of a technique that was not probed yet and may make a difference."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """The next one; None when every choice was probed."""
        return next(
            (
                Proposal(config=config, reason=f"{name}={choice} was not tried yet")
                for name, choice, config in self.left(history)
            ),
            None,
        )

    def left(self, history: History) -> Iterator[tuple[str, Choice, Config]]:
        """The choices that were not probed, each with a config that has it. Of a number of something, one choice will do."""
        admissible = history.admissible()
        configs = {*history.known, *history.running}
        probed = {choice for config in configs for choice in config.choices}
        ordered = {name: technique.off for name, technique in techniques.REGISTRY.items() if technique.ordered}
        numbers = {name for name, choice in probed if name in ordered and choice != ordered[name]}
        start = (history.best[0] if history.best else history.space.baseline).as_dict()
        for name, choices in history.space.choices.items():
            for choice in choices:
                if name in {*BATCH_KEYS, *numbers} or (name, choice) in probed:
                    continue
                config = history.space.complete({**start, name: choice})
                if admissible(config) and self._cost_model.may_gain(history, config, name):
                    numbers |= {name} & ordered.keys()
                    yield name, choice, config
