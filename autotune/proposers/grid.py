"""Every config of the space once, in random order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

from autotune.proposers.base import InTurn
from autotune.proposers.design import StartingDesign
from autotune.proposers.one_at_a_time import UndoChanges
from autotune.records.config import Config
from autotune.records.study import Proposal
from autotune.space import Space
from autotune.study.history import History

MOST_LOOKED_AT = (
    100_000  # combinations, of which none may be probed: it takes some seconds, and there is hardly one left
)


class Grid:
    """Proposes the whole space.

    Args:
        seed: for the order.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._space: Space | None = None
        self._waiting: Iterator[Config] = iter(())

    def propose(self, history: History) -> Proposal | None:
        """The next config that may be probed."""
        if self._space is not history.space:
            self._space, self._waiting = history.space, _in_random_order(history.space, self._seed)
        admissible = history.admissible()
        for config in islice(self._waiting, MOST_LOOKED_AT):
            if admissible(config):
                return Proposal(config=config, reason="the grid's next")
        return None


def _in_random_order(space: Space, seed: int) -> Iterator[Config]:
    """Every combination of the space's choices, completed. None is held that was not drawn: there may be millions.

    Source: Fisher and Yates's shuffle, of which only the places that have changed are kept.
    """
    chance, moved = random.Random(seed), dict[int, int]()
    for place in range(space.num_combinations):
        other = chance.randrange(place, space.num_combinations)
        found = moved.get(other, other)
        moved[other] = moved.pop(place, place)
        yield space.combination(found)


SAMPLERS = {"grid": lambda cost_model, seed: InTurn([StartingDesign, UndoChanges, lambda: Grid(seed), UndoChanges])}
