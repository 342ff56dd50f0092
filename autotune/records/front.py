"""The memory/throughput front: what no other choice beats in both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.records.result import Measured


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point beats, by increasing memory.

    A point beats another when it needs no more memory and is no slower, and is better in one of the two. Of equal
    points the first is kept.

    Args:
        points: (memory, throughput) pairs; less of the first and more of the second is better.
    """
    by_memory = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1], index))
    front: list[int] = []
    for index in by_memory:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def front_of(measured: Iterable[Measured]) -> tuple[Measured, ...]:
    """The configs that no other beats in both memory and throughput, by increasing memory."""
    points = list(measured)
    return tuple(points[index] for index in pareto_front([(m.peak_bytes, m.samples_per_s) for m in points]))
