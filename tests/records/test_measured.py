"""The memory/throughput front, and what rounds as a whole were above or below the others."""

from __future__ import annotations

import math
import random

import pytest

from autotune.records.measured import pareto_front, round_effects


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], []),
        ([(3.0, 30.0), (1.0, 10.0), (2.0, 20.0)], [1, 2, 0]),  # by increasing memory and throughput
        ([(1.0, 10.0), (2.0, 10.0), (3.0, 9.0)], [0]),  # more memory for no more speed
        ([(1.0, 10.0), (1.0, 12.0)], [1]),  # of equal memory the faster
        ([(1.0, 10.0), (1.0, 10.0)], [0]),  # of equal ones the first
    ],
)
def test_the_front_has_what_nothing_beats(points: list[tuple[float, float]], expected: list[int]) -> None:
    assert pareto_front(range(len(points)), points.__getitem__) == expected


def test_it_agrees_with_the_definition_on_random_points() -> None:
    draw = random.Random(0)
    for _ in range(50):
        points = [(float(draw.randrange(8)), float(draw.randrange(8))) for _ in range(12)]
        unbeaten = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)}
        front = pareto_front(points, lambda point: point)
        assert front == sorted(unbeaten)


def test_with_three_axes_a_slower_one_that_takes_less_energy_is_not_beaten() -> None:
    points = [(1.0, 10.0, 5.0), (1.0, 8.0, 3.0), (2.0, 9.0, 4.0), (2.0, 8.0, 3.0), (3.0, 11.0, 9.0)]
    assert pareto_front(points, lambda point: point) == [points[0], points[1], points[2], points[4]]


def logs(**figures):
    return {name: {n: math.log(value) for n, value in values.items()} for name, values in figures.items()}


def test_rounds_that_all_ran_differ_by_what_they_have_in_common():
    effects = round_effects(logs(a={0: 100, 1: 130}, b={0: 50, 1: 65}, c={0: 10, 1: 13}))
    assert effects[1] - effects[0] == pytest.approx(math.log(1.3))
    assert sum(effects.values()) == pytest.approx(0)


def test_one_that_missed_most_rounds_is_held_against_the_others_in_its_own():
    values = logs(first=dict(enumerate([100, 100, 100, 130, 130])), late={3: 120, 4: 120})
    effects = round_effects(values)
    first, late = ([value - effects[n] for n, value in rounds.items()] for rounds in values.values())
    assert first == pytest.approx([first[0]] * 5, abs=1e-3)
    assert late[0] - first[0] == pytest.approx(math.log(120 / 130), abs=1e-3)


def test_who_ran_in_no_round_and_no_round_at_all_are_nothing_special():
    assert round_effects({"a": {0: 1.0}, "b": {}}) == {0: 0.0}
    assert round_effects({}) == {}
