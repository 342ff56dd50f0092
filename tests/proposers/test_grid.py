"""A grid proposes every config of the space once, and holds none that it has not drawn."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from autotune.proposers.grid import Grid
from autotune.space import Space
from tests.closed_form import ClosedFormRunner, make_search


def proposed(folder: Path, seed: int, most: int) -> list[object]:
    search = make_search(folder, ClosedFormRunner())
    grid, found = Grid(seed), []
    while len(found) < most and (proposal := grid.propose(search.history)) is not None:
        found.append(proposal.config)
    return found


def test_every_config_comes_in_an_order_of_the_seeds(tmp_path: Path) -> None:
    space = make_search(tmp_path, ClosedFormRunner()).history.space
    first, again, other = (proposed(tmp_path, seed, 10**6) for seed in (0, 0, 1))
    assert set(first) == set(space) and first == again != other and set(first) == set(other)


def test_of_millions_of_combinations_only_those_are_made_that_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []
    made = itertools.cycle(make_search(tmp_path, ClosedFormRunner()).history.space)
    monkeypatch.setattr(Space, "num_combinations", 10**9)
    monkeypatch.setattr(Space, "combination", lambda space, number: (numbers.append(number), next(made))[1])
    assert len(proposed(tmp_path, 0, 3)) == 3
    assert len(numbers) < 100 and len(set(numbers)) == len(numbers)
