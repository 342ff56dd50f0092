"""What a later run of a study's answer saw, beside what the study told."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.formats import Record


@dataclass(frozen=True, kw_only=True)
class Recheck(Record):
    """A later run of the answer and the baseline in turns, by `autotune verify --against`. Intervals are 95 %.

    Attributes:
        checked_at: when, in UTC.
        told_speedup, told_speedup_ci: the answer's throughput over the baseline's as the search measured it, with the interval from
            its own pairs alone.
        told_speedup_std: standard deviation of the logarithm of `told_speedup`; None in rechecks of older answers.
        speedup: the same as it was seen now.
        speedup_std: standard deviation of the logarithm of `speedup`, from the spread between equal processes.
        samples_per_s, told_samples_per_s: the answer's throughput, as seen now and as told.
    """

    checked_at: str
    told_speedup: float
    told_speedup_ci: tuple[float, float]
    told_speedup_std: float | None = None
    speedup: float
    speedup_std: float
    samples_per_s: float
    told_samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class Rechecks(Record):
    """All rechecks that a machine remembers of a device, the oldest first."""

    rechecks: tuple[Recheck, ...] = ()
