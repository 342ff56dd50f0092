"""The shapes of a run's micro batches, and how memory grows with them: libraries cache something for each shape.

oneDNN's kernels took 18 to 26 MiB for each length of a batch in a tagger in bf16, and 11 MiB in a recognizer of speech in fp32; the
tagger in fp32 kept nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, islice, pairwise
from statistics import median
from typing import Any

from autotune.task.batches import shapes
from autotune.units import MIB

Shape = tuple[object, ...]

NUM_LEAVES = 16  # of a batch: lists of thousands of numbers would take milliseconds
FEWEST_INCREMENTS = 4  # for a trend: five points that only rise are one sequence in 120
SURE_Z = 2.2  # of the trend: five points that only rise exceed it
PAGES_BYTES = MIB // 4  # smaller steps of a heap are no new kernels
STEPWISE = 0.3  # share of the new shapes that have to take something for a trend: one wide batch alone makes none
GIVEN_BACK = 0.25  # of what was taken: a cache gives back nothing
FEW_SHAPES = 64  # of a training: all of them have been met after a while
MOST_POINTS = 100  # all pairs of them are looked at


class Shapes:
    """Counts micro batches by their shape: that of each tensor in them."""

    def __init__(self) -> None:
        self._counts: Counter[Shape] = Counter()
        self._chosen: set[Shape] = set()

    def note(self, micro_batch: Any) -> bool:
        """Count a micro batch. Returns whether its shape is new. It takes microseconds, as it lies within what is timed."""
        self._counts[shape := _shape(micro_batch)] += 1
        return self._counts[shape] == 1

    def note_chosen(self, micro_batch: Any) -> None:
        """Take note of a micro batch that was not drawn, so that it says nothing of how often its shape occurs."""
        self._chosen.add(_shape(micro_batch))

    @property
    def are_several(self) -> bool:
        """Whether there are several."""
        return self.num_trained > 1

    @property
    def num_trained(self) -> int:
        """Different shapes so far, those that were not drawn included."""
        return len(self._chosen.union(self._counts))

    @property
    def num_seen(self) -> int:
        """Different shapes that were drawn so far."""
        return len(self._counts)

    def num_expected(self) -> float:
        """Different shapes of all micro batches that may come, those that were seen included.

        It is estimated from those that were seen once and twice: where many were seen once, many were not seen at all.

        Source: the bias-corrected form of Chao, Nonparametric estimation of the number of classes in a population,
        Scandinavian Journal of Statistics 11, 1984. It is a lower bound.
        """
        times = Counter(self._counts.values())
        return self.num_seen + times[1] * (times[1] - 1) / (2 * (times[2] + 1))

    @property
    def recur(self) -> bool:
        """Whether training is seen to meet no more than a few shapes, again and again: some of several have come more than once."""
        return self.num_seen > 1 and max(self._counts.values()) > 1 and self.num_expected() <= FEW_SHAPES


def _shape(micro_batch: Any) -> Shape:
    return tuple(islice(shapes(micro_batch), NUM_LEAVES))


@dataclass(frozen=True)
class Held:
    """What the process keeps after some micro batches.

    Attributes:
        num_shapes: different shapes of them.
    """

    num_shapes: int
    num_bytes: int


def are_enough(held: Sequence[Held]) -> bool:
    """Whether so many batches tell a trend: after the first ones, enough of them had a new shape."""
    return len(_by_shape(_settled(held))) > FEWEST_INCREMENTS


def growth_per_shape(held: Sequence[Held]) -> float | None:
    """Bytes by which memory grows with each new shape; 0 unless it clearly grows to the last of them, None where too few tell that.

    Source: the trend's test is Mann's (Nonparametric tests against trend, Econometrica 13, 1945), by shapes in place of time, its slope
    Sen's (Estimates of the regression coefficient based on Kendall's tau, JASA 63, 1968).
    """
    if not are_enough(held):
        return None
    told = _by_shape(_settled(held))
    told = told[:: -math.ceil(len(told) / MOST_POINTS) or -1][::-1]  # the last one is among them
    count, increments = len(told), [after.num_bytes - before.num_bytes for before, after in pairwise(told)]
    growing = sum(grown > PAGES_BYTES for grown in increments)
    taken, given_back = sum(max(0, grown) for grown in increments), sum(max(0, -grown) for grown in increments)
    if growing < STEPWISE * len(increments) or given_back > GIVEN_BACK * taken:
        return 0.0
    signs = sum((b.num_bytes > a.num_bytes) - (b.num_bytes < a.num_bytes) for a, b in combinations(told, 2))
    if signs - 1 < SURE_Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18):
        return 0.0
    least = min(_slope(part) or 0.0 for part in (told, told[count // 2 :]))
    return least if least >= PAGES_BYTES else 0.0


def growth_where_it_grows(held: Sequence[Held]) -> float:
    """The same where memory is known to grow with each new shape, from however few batches."""
    return max(0.0, _slope(_settled(held)) or 0.0)


def _slope(held: Sequence[Held]) -> float | None:
    """Bytes for each new shape; None where there was no new one."""
    later = [(before, after) for before, after in combinations(held, 2) if after.num_shapes > before.num_shapes]
    slopes = [(after.num_bytes - before.num_bytes) / (after.num_shapes - before.num_shapes) for before, after in later]
    return median(slopes) if slopes else None


def _settled(held: Sequence[Held]) -> Sequence[Held]:
    """Without the first ones, in which allocators settle."""
    return held[max(1, len(held) // 3) :]


def _by_shape(held: Sequence[Held]) -> Sequence[Held]:
    """One for each number of shapes: batches of shapes that were there before differ by noise alone."""
    groups = groupby(held, key=lambda one: one.num_shapes)
    return [Held(num_shapes, round(median(one.num_bytes for one in group))) for num_shapes, group in groups]
