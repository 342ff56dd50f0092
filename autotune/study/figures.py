"""Statistics over several processes of one config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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


def at_one_time(searched: Mapping[Config, Measured], played: Mapping[Config, Measured]) -> dict[Config, Measured]:
    """The figures of the search and of the play-off side by side, although the machine may have become slower in between.

    A config that played has its figures there. The speed of another one is multiplied by what those that ran in both have
    changed by, in the median.
    """
    both = [math.log(played[c].samples_per_s / searched[c].samples_per_s) for c in played.keys() & searched.keys()]
    change = math.exp(median(both)) if both else 1.0
    return {config: times_as_fast(found, change) for config, found in searched.items()} | {**played}


def times_as_fast(found: Measured, factor: float) -> Measured:
    """The figures of a config on a machine that is so many times as fast."""
    low, high = found.samples_per_s_ci
    return replace(
        found,
        samples_per_s=found.samples_per_s * factor,
        samples_per_s_ci=(low * factor, high * factor),
        step_s=found.step_s / factor,
    )


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
        step_s=median(one.step_s * one.samples_per_s for one in found) / speed,  # the samples of a step, at that speed
        num_processes=len(found),
    )
