"""Statistics over several processes of one config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from autotune.records.config import Config
from autotune.records.outcome import Outcome
from autotune.records.result import Measured

SINGLE_SPREAD = 1.25  # between one process and another, where only one was run


def ratio_interval(logs: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Geometric mean and its Student interval, from logarithms. A single value is given an interval of 25 %."""
    from scipy.special import stdtrit  # Student's quantile; scipy.stats takes a second to import

    mean = fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), math.exp(mean) / SINGLE_SPREAD, math.exp(mean) * SINGLE_SPREAD
    half = float(stdtrit(len(logs) - 1, (1 + confidence) / 2)) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def measured(config: Config, outcomes: Iterable[Outcome]) -> Measured:
    """The throughput over fresh processes of a config, with the interval between them. At least one must have run."""
    found = [outcome.measurement for outcome in outcomes if outcome.measurement]
    if len(found) == 1:
        speed, low, high = found[0].samples_per_s, found[0].samples_per_s_low, found[0].samples_per_s_high
    else:
        speed, low, high = ratio_interval([math.log(measurement.samples_per_s) for measurement in found])
    return Measured(
        config=config.as_dict(),
        samples_per_s=speed,
        samples_per_s_ci=(low, high),
        peak_bytes=max(measurement.peak_bytes for measurement in found),
        step_s=median(measurement.step_s for measurement in found),
        num_processes=len(found),
    )
