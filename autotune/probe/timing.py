"""Decides when a probe is warm and timed long enough, and how certain its throughput is. Pure rules, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

from autotune.records.intervals import NORMAL_95

MIN_WARMUP_STEPS = 3  # optimizer steps: state allocated, kernels chosen, caches filled; the first one says nothing
WARM_DIFFERENCE = 0.05  # two successive medians of three steps differ by less than this
MIN_BLOCKS = 6  # the fewest whose range is a 95 % interval of the median
OVERTIME = 3  # times the time allowed, at which two blocks have to do: steps that take so long differ little
MIN_BLOCK_S = 0.05  # a shorter block is too near the clock's and the scheduler's grain
STALL_FACTOR = 1.5  # noise no longer shrinks: this many times more blocks have not narrowed the interval


def is_warm(step_s: Sequence[float]) -> bool:
    """Whether the durations of successive steps have settled: two successive medians (of up to three) agree."""
    if len(step_s) < MIN_WARMUP_STEPS - 1:
        return False
    now, before = median(step_s[-3:]), median(step_s[:-1][-3:])
    return abs(now - before) < WARM_DIFFERENCE * before


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Distribution-free interval of the median, from order statistics.

    Source: Hahn and Meeker, Statistical Intervals (1991), section 5.2; also Le Boudec, Performance Evaluation (2010),
    theorem 2.1. With fewer than six values no such interval reaches 95 %, and the whole range is returned.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail, rank = 0.0, 0
    while rank < (count - 1) // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - confidence:
            break
        rank += 1
    index = max(rank - 1, 0)
    return ordered[index], ordered[count - 1 - index]


def rate_interval(samples_per_s: Sequence[float]) -> tuple[float, float, float]:
    """Throughput of blocks of equally many samples that differ in their work, with its 95 % interval: rate, low, high.

    The rate is all samples over all the time: a median would leave out the samples that take long. The interval is
    Student's, of the mean time per sample; its quantile is Abramowitz and Stegun's 26.7.5 (3 % low at three values).
    """
    times = [1 / speed for speed in samples_per_s]
    mean_s, freedom = fmean(times), len(times) - 1
    if freedom == 0:
        return 1 / mean_s, 1 / mean_s, 1 / mean_s
    z = NORMAL_95
    quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    quantile += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    half_s = quantile * stdev(times) / math.sqrt(len(times))
    return 1 / mean_s, 1 / (mean_s + half_s), 1 / max(mean_s - half_s, min(times))


@dataclass
class Blocks:
    """The throughputs of timed blocks so far, and whether there are enough of them.

    Attributes:
        interval: half-width of the 95 % interval to reach, as a share of the throughput.
        max_timed_s: time after which no further block is worth it.
        min_timed_s: time before which there are not enough, however little they differ.
        unequal: samples differ in their work, as a dataset's do; otherwise blocks differ by noise alone.
    """

    interval: float
    max_timed_s: float
    min_timed_s: float = 0.0
    unequal: bool = False
    samples_per_s: list[float] = field(default_factory=list)
    timed_s: float = 0.0
    _narrowest: float = math.inf
    _narrowest_at: int = 0

    def add(self, samples_per_s: float, block_s: float) -> None:
        """Add one block."""
        self.samples_per_s.append(samples_per_s)
        self.timed_s += block_s
        width = self.half_width
        if len(self.samples_per_s) >= MIN_BLOCKS and width < 0.95 * self._narrowest:
            self._narrowest, self._narrowest_at = width, len(self.samples_per_s)

    @property
    def throughput(self) -> tuple[float, float, float]:
        """Samples/s with its 95 % interval: the robust median for equal blocks, else all samples over all the time."""
        if self.unequal:
            return rate_interval(self.samples_per_s)
        return median(self.samples_per_s), *median_interval(self.samples_per_s)

    @property
    def half_width(self) -> float:
        """Half the 95 % interval, as a share of the throughput."""
        speed, low, high = self.throughput
        return (high - low) / 2 / speed

    @property
    def enough(self) -> bool:
        """Whether the interval is reached, the noise no longer shrinks, or the time is up."""
        count = len(self.samples_per_s)
        if self.timed_s < self.min_timed_s:
            return False
        if count < MIN_BLOCKS:
            return count >= 2 and self.timed_s >= OVERTIME * self.max_timed_s
        stalled = count >= 2 * MIN_BLOCKS and count > STALL_FACTOR * self._narrowest_at
        return self.half_width <= self.interval or stalled or self.timed_s >= self.max_timed_s
