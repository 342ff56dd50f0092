"""Every config of the space once, in random order."""

from __future__ import annotations

import random

from autotune.proposers.base import InTurn
from autotune.proposers.design import StartingDesign
from autotune.proposers.one_at_a_time import UndoChanges
from autotune.records.config import Config
from autotune.records.study import Proposal
from autotune.space import Space
from autotune.study.history import History


class Grid:
    """Proposes the whole space.

    Args:
        seed: for the order.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._space: Space | None = None
        self._waiting: list[Config] = []

    def propose(self, history: History) -> Proposal | None:
        """The next config that may be probed."""
        if self._space is not history.space:
            self._space, self._waiting = history.space, list(history.space)
            random.Random(self._seed).shuffle(self._waiting)
        admissible = history.admissible()
        while self._waiting:
            config = self._waiting.pop()
            if admissible(config):
                return Proposal(config=config, reason="the grid's next")
        return None


SAMPLERS = {"grid": lambda cost_model, seed: InTurn([StartingDesign, UndoChanges, lambda: Grid(seed), UndoChanges])}
