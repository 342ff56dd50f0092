"""The memory/throughput front."""

from __future__ import annotations

import random

from autotune.records.measured import pareto_front


def test_no_points_have_an_empty_front() -> None:
    assert pareto_front([]) == []


def test_the_front_comes_by_increasing_memory_and_throughput() -> None:
    assert pareto_front([(3.0, 30.0), (1.0, 10.0), (2.0, 20.0)]) == [1, 2, 0]


def test_a_point_that_needs_more_memory_for_no_more_speed_is_beaten() -> None:
    assert pareto_front([(1.0, 10.0), (2.0, 10.0), (3.0, 9.0)]) == [0]


def test_of_points_with_equal_memory_the_faster_stays() -> None:
    assert pareto_front([(1.0, 10.0), (1.0, 12.0)]) == [1]


def test_of_equal_points_the_first_stays() -> None:
    assert pareto_front([(1.0, 10.0), (1.0, 10.0)]) == [0]


def test_it_agrees_with_the_definition_on_random_points() -> None:
    draw = random.Random(0)
    for _ in range(50):
        points = [(float(draw.randrange(8)), float(draw.randrange(8))) for _ in range(12)]
        unbeaten = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)}
        front = [points[index] for index in pareto_front(points)]
        assert front == sorted(unbeaten)
