"""The shapes of a run's micro batches, and how memory grows with them: libraries cache something for each shape.

oneDNN's kernels took 18 to 26 MiB for each length of a batch in a tagger in bf16, and 11 MiB in a recognizer of speech in fp32; the
tagger in fp32 kept nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice, pairwise
from statistics import median
from typing import Any

from autotune.task.batches import shapes
from autotune.units import MIB

Shape = tuple[object, ...]

NUM_LEAVES = 16  # of a batch: lists of thousands of numbers would take milliseconds
SURE_Z = 2.2  # of the trend: five points that only rise exceed it, which are one sequence in 120
PAGES_BYTES = MIB // 4  # smaller steps of a heap are no new kernels
STEPWISE = 0.3  # share of the new shapes that have to take something for a trend: one wide batch alone makes none
GIVEN_BACK = 0.25  # of what was taken: an allocator gives back nearly all, a cache nothing
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
    """Whether so many batches would tell a trend, if memory only rose with each new shape after the first batches."""
    return _z([Held(one.num_shapes, one.num_shapes) for one in _settled(held)]) >= SURE_Z


def growth_per_shape(held: Sequence[Held]) -> float | None:
    """Bytes by which memory grows with each new shape; 0 unless it clearly grows to the last of them, None where too few tell that.

    Source: the trend's test is Mann's (Nonparametric tests against trend, Econometrica 13, 1945), by shapes in place of time, and with the
    variance for ties of Kendall (Rank Correlation Methods, 1975, chapter 4); its slope is Sen's (Estimates of the regression
    coefficient based on Kendall's tau, JASA 63, 1968).
    """
    if not are_enough(held):
        return None
    settled = _settled(held)
    pairs = [*pairwise(settled)]
    increments = [after.num_bytes - before.num_bytes for before, after in pairs]
    of_new = [
        grown for grown, (before, after) in zip(increments, pairs, strict=True) if after.num_shapes > before.num_shapes
    ]
    growing = sum(grown > PAGES_BYTES for grown in of_new)
    taken, given_back = sum(max(0, grown) for grown in increments), sum(max(0, -grown) for grown in increments)
    if growing < STEPWISE * len(of_new) or given_back > GIVEN_BACK * taken or _z(settled) < SURE_Z:
        return 0.0
    slopes = [slope for part in (settled, settled[len(settled) // 2 :]) if (slope := _slope(part)) is not None]
    least = min(slopes, default=0.0)
    return least if least >= PAGES_BYTES else 0.0


def growth_where_it_grows(held: Sequence[Held]) -> float:
    """The same where memory is known to grow with each new shape, from however few batches."""
    return max(0.0, _slope(_settled(held)) or 0.0)


def _slope(held: Sequence[Held]) -> float | None:
    """Bytes for each new shape; None where there was no new one."""
    later = [(before, after) for before, after in combinations(held, 2) if after.num_shapes > before.num_shapes]
    slopes = [(after.num_bytes - before.num_bytes) / (after.num_shapes - before.num_shapes) for before, after in later]
    return median(slopes) if slopes else None


def _z(held: Sequence[Held]) -> float:
    """By how many standard deviations memory rises with the number of shapes, beyond what chance makes of it."""
    count, alike = len(held), Counter(one.num_shapes for one in held)
    told = [(a, b) for a, b in combinations(held, 2) if b.num_shapes > a.num_shapes]
    signs = sum((b.num_bytes > a.num_bytes) - (b.num_bytes < a.num_bytes) for a, b in told)
    variance = _times_its_variance(count) - sum(map(_times_its_variance, alike.values()))
    return (signs - 1) / math.sqrt(variance / 18) if variance else 0.0


def _times_its_variance(count: int) -> int:
    """18 times the variance of the number of pairs in order less those out of order, among so many values."""
    return count * (count - 1) * (2 * count + 5)


def _settled(held: Sequence[Held]) -> Sequence[Held]:
    """Without the first ones, in which allocators settle; of very many some that are evenly spread, the last one among them."""
    settled = held[max(1, len(held) // 3) :]
    return settled[:: -math.ceil(len(settled) / MOST_POINTS) or -1][::-1]
