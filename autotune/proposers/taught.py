"""Starts where like studies ended: what was best there is the first thing to try after the baseline."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.proposers.cost_model import CostModel
from autotune.records.config import BATCH_KEYS, BATCH_SIZE, Choice, Config
from autotune.records.study import Proposal
from autotune.space import Space
from autotune.study.history import History


class StartWhereOthersEnded:
    """The most alike study's answer, once: at its micro batch, or at the nearest below that fits."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """That config; None where its techniques were probed at any batch, where it is the baseline, and where nothing was taught."""
        first = self._cost_model.taught.first()
        if not first or history.best is None:
            return None
        space, admissible = history.space, history.admissible()
        config = in_space(first, space)
        tried = (*history.known, *history.running)
        if any(has_switches_of(config, other) for other in tried if other != space.baseline) or config in tried:
            return None
        sizes = sorted(
            (int(size) for size in space.choices[BATCH_SIZE] if int(size) <= config.batch_size), reverse=True
        )
        for size in sizes:
            smaller = space.complete({**config, BATCH_SIZE: size})
            if admissible(smaller) and self._cost_model.is_likely_to_fit(history, smaller):
                named = self._cost_model.taught.lessons[0].study.name
                return Proposal(config=smaller, reason=f"the best of {named}, a like study")
        return None


def in_space(choices: Mapping[str, Choice], space: Space) -> Config:
    """The config with these choices as far as the space has them; on a scale the nearest one."""
    found: dict[str, Choice] = {}
    for name, choice in choices.items():
        among = space.choices[name]
        if space.techniques.is_ordered(name) or name == BATCH_SIZE:
            found[name] = min(among, key=lambda one: abs(int(one) - int(choice)))
        elif choice in among:
            found[name] = choice
    return space.complete(found)


def has_switches_of(config: Config, other: Config) -> bool:
    """Whether two configs differ in nothing but their batch."""
    return config.differences(other).keys() <= {*BATCH_KEYS}
