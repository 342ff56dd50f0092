"""Undoes each change of the best config in turn, to see what each gains and whether it is needed."""

from __future__ import annotations

from collections.abc import Callable

from autotune.records.batch_plan import ACCUMULATION
from autotune.records.config import Config
from autotune.records.trial import ABLATION, Proposal
from autotune.space import Space
from autotune.study.history import History


class UndoChanges:
    """Proposes the best config with each of its changes undone. If one of those is better, it starts again from that one.

    Args:
        likely_to_fit: whether a config is likely to fit; one that does not fit says nothing about a technique.
    """

    def __init__(self, likely_to_fit: Callable[[History, Config], bool] = lambda history, config: True) -> None:
        self._likely_to_fit = likely_to_fit

    def propose(self, history: History) -> Proposal | None:
        """The best config with its next change undone; None when all changes were."""
        admissible = history.admissible()
        for config, reason in one_change_back(history.best[0], history.space) if history.best else ():
            if admissible(config) and self._likely_to_fit(history, config):
                return Proposal(config=config, stage=ABLATION, reason=reason)
        return None


def one_change_back(config: Config, space: Space) -> list[tuple[Config, str]]:
    """The config with each of its changes from the baseline undone, and the reason to probe it."""
    undone = []
    for name in config.differences(space.baseline):
        if name != ACCUMULATION:
            without = space.complete({**config.as_dict(), name: space.baseline[name]})
            if space.contains(without):
                undone.append((without, f"the best without {name}"))
    return undone
