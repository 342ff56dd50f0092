"""Undoes each change of the best config in turn, to see what each gains and whether it is needed."""

from __future__ import annotations

import math
from collections.abc import Callable

from autotune.records.batch_plan import ACCUMULATION
from autotune.records.config import Config
from autotune.records.trial import ABLATION, Prediction, Proposal
from autotune.space import Space
from autotune.study.history import History


class UndoChanges:
    """Proposes the best config with each of its changes undone. If one of those is better, it starts again from that one.

    Args:
        likely_to_fit: whether a config is likely to fit; one that does not fit says nothing about a technique.
        predict: what is predicted of a config. The change that is expected to matter most is undone first; without
            predictions they are undone in the order of the config's keys.
    """

    def __init__(
        self,
        likely_to_fit: Callable[[History, Config], bool] = lambda history, config: True,
        predict: Callable[[History, Config], Prediction | None] = lambda history, config: None,
    ) -> None:
        self._likely_to_fit, self._predict = likely_to_fit, predict

    def propose(self, history: History) -> Proposal | None:
        """The best config with its next change undone; None when all changes were."""
        if history.best is None:
            return None
        best, admissible = history.best[0], history.admissible()
        undone = [
            (config, reason)
            for config, reason in one_change_back(best, history.space)
            if admissible(config) and self._likely_to_fit(history, config)
        ]
        if not undone:
            return None
        best_log = self._log_speed(history, best)
        config, reason = max(undone, key=lambda one: abs(self._log_speed(history, one[0]) - best_log))
        return Proposal(config=config, stage=ABLATION, reason=reason)

    def _log_speed(self, history: History, config: Config) -> float:
        prediction = self._predict(history, config)
        return math.log(prediction.samples_per_s) if prediction and prediction.samples_per_s else 0.0


def one_change_back(config: Config, space: Space) -> list[tuple[Config, str]]:
    """The config with each of its changes from the baseline undone, and the reason to probe it."""
    undone = []
    for name in config.differences(space.baseline):
        if name != ACCUMULATION:
            without = space.complete({**config.as_dict(), name: space.baseline[name]})
            if space.contains(without):
                undone.append((without, f"the best without {name}"))
    return undone
