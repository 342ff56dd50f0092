"""Decides when a run is warm and when it was timed long enough, computes its throughput with an interval, and reports its progress. The
same rules serve the steps of a probe (`probe/measure.py`) and those of a user's command (`runners/watch.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Any

from autotune.records.config import ProbeSettings
from autotune.records.measured import NORMAL_95
from autotune.records.outcome import Measurement, Progress

MIN_WARMUP_STEPS = 3  # optimizer steps: state allocated, kernels chosen, caches filled; the first one says nothing
WARM_DIFFERENCE = 0.05  # two successive medians of three steps differ by less than this, and a block that may be cold from those after it
MIN_BLOCKS = 6  # the range of so many blocks is a 95 % interval of their median; that of fewer is not
FEWEST_BLOCKS = 2  # of one alone there is no interval
OVERTIME = 2  # after this many times `max_timed_s` two blocks are enough: long steps differ little. If not, three, after twice as long
UNLIKE = 0.1  # of their median, by which such blocks must not differ. A heap of 1 GiB that is trimmed now and then made it 30 %
MIN_BLOCK_S = 0.05  # a shorter block is too near the grain of clock and scheduler
FAR = 1.25  # two processes of one config now and then differ by this factor, so a config within it of the front may not have lost
LATE = 0.75  # after this share of the time-out timing ends with the blocks so far: a killed process measures nothing
REPORT_INTERVAL_S = 0.25  # between two reports
MANY_STARTS = 3  # of passes over the training set: so many in the timed blocks stand for those of a long run
STALL_FACTOR = 1.5  # noise no longer shrinks if the interval has not narrowed while the blocks grew by this factor


def is_warm(step_s: Sequence[float]) -> bool:
    """Whether the durations of successive steps have settled: two successive medians (of up to three) agree."""
    if len(step_s) < MIN_WARMUP_STEPS - 1:
        return False
    now, before = median(step_s[-3:]), median(step_s[:-1][-3:])
    return abs(now - before) < WARM_DIFFERENCE * before


def micro_steps_per_block(micro_s: float, step_s: float, accumulation_steps: int, *, by_parts: bool) -> int:
    """Micro steps of a block: those of an optimizer step, of several short ones, or a part of those of one.

    Args:
        micro_s: seconds of a micro step.
        step_s: seconds of an optimizer step, of so many micro steps and an update.
        by_parts: whether a step is timed by its parts, where each of them is long enough.
    """
    of_part = math.ceil(MIN_BLOCK_S / micro_s)
    if by_parts and of_part < accumulation_steps:
        return of_part
    return accumulation_steps * max(1, math.ceil(MIN_BLOCK_S / step_s))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Distribution-free 95 % interval of the median, from order statistics.

    Source: Hahn and Meeker, Statistical Intervals (1991), section 5.2; also Le Boudec, Performance Evaluation (2010),
    theorem 2.1. With fewer than six values no such interval reaches 95 %, and the whole range is returned.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail, rank = 0.0, 0
    while rank < (count - 1) // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 0.05:
            break
        rank += 1
    index = max(rank - 1, 0)
    return ordered[index], ordered[count - 1 - index]


def rate_interval(samples_per_s: Sequence[float]) -> tuple[float, float, float]:
    """(rate, low, high): the throughput with its 95 % interval, of blocks that have equally many samples and differ in their work.

    The rate is all samples over all the time, since a median would leave out the samples that take long. The interval is
    Student's for the mean time per sample; its quantile is exact for two and three values, beyond that Abramowitz and Stegun's 26.7.5.
    """
    times = [1 / speed for speed in samples_per_s]
    mean_s, freedom = fmean(times), len(times) - 1
    if freedom == 0:
        return 1 / mean_s, 1 / mean_s, 1 / mean_s
    half_s = _student_95(freedom) * stdev(times) / math.sqrt(len(times))
    return 1 / mean_s, 1 / (mean_s + half_s), 1 / max(mean_s - half_s, min(times))


def _student_95(freedom: int) -> float:
    """95 % of Student's distribution lie within this of zero."""
    if freedom <= 2:
        return (12.706, 4.303)[freedom - 1]
    z = NORMAL_95
    quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return quantile + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)


@dataclass(frozen=True)
class _Block:
    """One block.

    Attributes:
        num_starts: passes over the training set that started in it.
        has_new_shapes: whether a micro batch in it had a shape that none had before.
    """

    samples_per_s: float
    num_starts: int = 0
    has_new_shapes: bool = False


@dataclass
class Blocks:
    """The blocks timed so far, and whether these are enough by the settings' `interval` and times.

    Attributes:
        unequal: whether samples differ in their work, as a dataset's do; otherwise blocks differ by noise alone.
        is_first_warm: whether the first of them is known to be warm. Where it is the run's second step, those after it show that; it is
            left out where they do not.
    """

    settings: ProbeSettings
    unequal: bool = False
    is_first_warm: bool = True
    timed_s: float = 0.0
    num_samples: int = 0
    _blocks: list[_Block] = field(default_factory=list)
    _narrowest: float = math.inf
    _narrowest_at: int = 0

    @property
    def samples_per_s(self) -> list[float]:
        """The throughput of each."""
        return [block.samples_per_s for block in self._blocks]

    def add(
        self,
        samples_per_s: float,
        block_s: float,
        *,
        num_samples: int = 0,
        starts: int = 0,
        has_new_shapes: bool = False,
    ) -> None:
        """Add one block, in which so many samples were taken, and so many passes over the training set started.

        Args:
            has_new_shapes: whether a micro batch in it had a shape that none had before.
        """
        self._blocks.append(_Block(samples_per_s, starts, has_new_shapes))
        self.timed_s += block_s
        self.num_samples += num_samples
        if not self.is_first_warm and len(self._blocks) > FEWEST_BLOCKS:
            self._judge_the_first()
        width = self.half_width
        if len(self._blocks) >= MIN_BLOCKS and width < 0.95 * self._narrowest:
            self._narrowest, self._narrowest_at = width, len(self._blocks)

    def _judge_the_first(self) -> None:
        """Leave out the first block where it differs from those after it as a run's steps do that has not settled."""
        first, *later = self.samples_per_s
        if abs(first - median(later)) > WARM_DIFFERENCE * median(later):
            del self._blocks[0]
        self.is_first_warm = True

    def leave_out_starts(self) -> bool:
        """Leave out the blocks in which a pass over the training set started, unless many did or no block would be left that is warm.

        Returns whether no start is in the blocks now.
        """
        within = [block for block in self._blocks if not block.num_starts]
        num_starts = sum(block.num_starts for block in self._blocks)
        if len(within) < (1 if self.is_first_warm else FEWEST_BLOCKS) or num_starts >= MANY_STARTS:
            return False
        self._blocks = within
        return True

    def leave_out_new_shapes(self) -> None:
        """Leave out the blocks up to the last of the first half in which a shape came for the first time: kernels are made in those.

        Later blocks with a rare shape count. They are more work than others, or less.
        """
        first_half = self._blocks[: len(self._blocks) // 2]
        num_first = max((number for number, block in enumerate(first_half, start=1) if block.has_new_shapes), default=0)
        del self._blocks[:num_first]

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
    def _agree(self) -> bool:
        """Whether equal blocks differ as little as long ones should. The first of a process may not, in the same way in each process."""
        speeds = self.samples_per_s
        if not self.is_first_warm:
            return max(speeds) - min(speeds) <= WARM_DIFFERENCE * median(speeds)
        return self.unequal or max(speeds) - min(speeds) <= UNLIKE * median(speeds)

    @property
    def enough(self) -> bool:
        """Whether the interval is narrow enough, the noise no longer shrinks, the samples were taken, or the time is up."""
        count = len(self._blocks)
        if self.timed_s < self.settings.min_timed_s:
            return False
        # the same samples in each process of a round; blocks in which a pass started may be left out later
        num_with_starts = sum(block.num_starts > 0 for block in self._blocks)
        if self.settings.num_samples and count - num_with_starts >= FEWEST_BLOCKS:
            is_late = self.timed_s >= OVERTIME * self.settings.max_timed_s
            return self.num_samples >= self.settings.num_samples or is_late
        if count < MIN_BLOCKS:
            overtime_s, fewest = OVERTIME * self.settings.max_timed_s, FEWEST_BLOCKS
            if count >= fewest and not self._agree:
                overtime_s, fewest = 2 * overtime_s, 3  # the median of two that differ lies where neither is
            return count >= fewest and self.timed_s >= overtime_s
        stalled = count >= 2 * MIN_BLOCKS and count > STALL_FACTOR * self._narrowest_at
        is_late = self.timed_s >= self.settings.max_timed_s
        return self.half_width <= self.settings.interval or stalled or is_late


@dataclass
class Timing:
    """Decides when a run is warm, whether it is worth timing, and when it was timed enough.

    Attributes:
        samples: samples of an optimizer step.
        peak_bytes: reads the most memory held so far.
        unequal: as in `Blocks`.
        blocks: the blocks timed so far.
    """

    settings: ProbeSettings
    samples: int
    peak_bytes: Callable[[], int]
    unequal: bool
    blocks: Blocks = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.settings, self.unequal)

    def is_warm(self, num_steps: int, steps_s: Sequence[float], warmup_s: float) -> bool:
        """Whether enough steps were taken, and they have settled or the time for warming up is over.

        Args:
            steps_s: durations of the steps that tell the speed: without the first, and without those that compiled if others exist.
            warmup_s: seconds of warm-up so far; a probe leaves out the steps that compiled.
        """
        settled = is_warm(steps_s) or warmup_s > self.settings.max_warmup_s
        return num_steps >= MIN_WARMUP_STEPS and settled

    def is_hopeless(self, steps_s: Sequence[float]) -> bool:
        """Whether a config with such steps is too slow to be worth timing.

        It is if its median step is below `slowest_samples_per_s`, or if the front beats even its fastest step by the factor `FAR`.
        """
        is_slow = self.samples / median(steps_s) < self.settings.slowest_samples_per_s
        return is_slow or self._is_beaten(FAR * self.samples / min(steps_s))

    def cut_short(self, steps_s: Sequence[float]) -> bool:
        """If the config is too slow to be worth timing, make its warm-up steps the measurement. Returns whether it is too slow."""
        if self.settings.num_steps or not self.is_hopeless(steps_s):
            return False
        for step_s in steps_s:
            self.blocks.add(self.samples / step_s, 0.0)
        return True

    def is_done(self, num_steps: int, spent_s: float) -> bool:
        """Whether to time no further block.

        Args:
            num_steps: number of steps timed so far.
            spent_s: seconds since the process, or the command, was started.
        """
        if self.settings.num_steps:
            return num_steps >= self.settings.num_steps
        is_late = bool(self.blocks.samples_per_s) and spent_s > LATE * self.settings.timeout_s
        return is_late or self.blocks.enough or self._has_lost

    @property
    def _has_lost(self) -> bool:
        """Whether a config of the front is surely faster in no more memory."""
        return len(self.blocks.samples_per_s) >= MIN_BLOCKS and self._is_beaten(self.blocks.throughput[2])

    def _is_beaten(self, samples_per_s: float) -> bool:
        peak_bytes = self.peak_bytes()
        return any(speed > samples_per_s and peak <= peak_bytes for peak, speed in self.settings.front)

    def measurement(self, **found: Any) -> Measurement:
        """The measurement, with the speed filled in.

        Args:
            found: the other fields, without those that observers fill in.
        """
        speed, low, high = self.blocks.throughput
        return Measurement(
            samples_per_s=speed,
            samples_per_s_low=low,
            samples_per_s_high=high,
            step_s=self.samples / speed,
            peak_bytes=self.peak_bytes(),
            block_samples_per_s=tuple(self.blocks.samples_per_s),
            **found,
        )


@dataclass
class Reporter:
    """Reports what a run has done so far: a few times a second, at each new stage, and after the first micro step.

    The process may be killed at any time; then the last report is all that is known.
    """

    send: Callable[[Progress], None]
    peak_bytes: Callable[[], int]
    batch_size: int  # samples of a micro step
    is_bound: bool = True  # a micro step's speed bounds a step's; not in a world, where lone ones exchange gradients
    stage: str = "setup"
    train_s: float = 0.0
    num_micro_steps: int = 0
    _fastest_micro_s: float = math.inf
    _sent_s: float = -math.inf

    def enter(self, stage: str) -> None:
        """Enter a stage."""
        self.stage = stage
        self._send()

    def trained(self, seconds: float, num_micro_steps: int, *, tells_speed: bool) -> None:
        """Count micro steps, or another part of a training step. The first step says nothing about the speed."""
        self.train_s += seconds
        is_new = not self.num_micro_steps and num_micro_steps > 0
        self.num_micro_steps += num_micro_steps
        if num_micro_steps and tells_speed:
            self._fastest_micro_s = min(self._fastest_micro_s, seconds / num_micro_steps)
        if is_new or time.perf_counter() > self._sent_s + REPORT_INTERVAL_S:
            self._send()

    @property
    def progress(self) -> Progress:
        """What has been done so far."""
        seen = self._fastest_micro_s < math.inf
        return Progress(
            stage=self.stage,
            train_s=self.train_s,
            num_micro_steps=self.num_micro_steps,
            peak_bytes=self.peak_bytes() if self.num_micro_steps else 0,
            samples_per_s_high=self.batch_size / self._fastest_micro_s if seen and self.is_bound else None,
        )

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self.send(self.progress)
