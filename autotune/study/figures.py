"""Statistics over several processes of one config."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev
from typing import Any

from autotune.devices.linux import DISTURBED
from autotune.records.config import Config
from autotune.records.measured import NORMAL_95, Measured
from autotune.records.outcome import Outcome

SINGLE_SPREAD = 1.25  # assumed factor between two processes, where only one was run
DELAYED = 2.0  # a step waits for its slowest thread, so it loses more than the threads' mean loss
MOST_HELD = 0.95  # others cannot have held more than this share of the time of a process that took steps


def ratio_interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean and its 95 % Student interval, from logarithms. A single value is given an interval of 25 %."""
    from scipy.special import stdtrit  # Student's quantile; scipy.stats takes a second to import

    mean = fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), math.exp(mean) / SINGLE_SPREAD, math.exp(mean) * SINGLE_SPREAD
    half = float(stdtrit(len(logs) - 1, 0.975)) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def unrest(outcome: Outcome) -> float:
    """How far a disturbance may have moved the logarithm of a process's speed, as a standard deviation; 0 where none was seen.

    It follows from the share of time in which others held the processor. A throttled clock has no such share and counts as
    the smallest share that is called a disturbance.
    """
    if outcome.measurement is None or not outcome.disturbances:
        return 0.0
    held = min(max(outcome.measurement.contention, DISTURBED), MOST_HELD)
    return -DELAYED * math.log1p(-held)


def undisturbed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The measured processes in which no disturbance was seen."""
    return [outcome for outcome in outcomes if outcome.measurement and not outcome.disturbances]


def at_one_time(
    searched: Mapping[Config, Measured], played: Mapping[Config, Measured], disturbed: Collection[Config] = ()
) -> dict[Config, Measured]:
    """The figures of the search and of the play-off side by side, although the machine may have become slower in between.

    A config that played keeps its figures of the play-off. The speed of any other is multiplied by the median change of the
    configs that ran in both, but never made faster than it was measured.

    Args:
        disturbed: configs whose search was disturbed by other work, so that they tell nothing of the machine's change.
    """
    both = (played.keys() & searched.keys()) - {*disturbed}
    changes = [math.log(played[config].samples_per_s / searched[config].samples_per_s) for config in both]
    change = min(1.0, math.exp(median(changes))) if changes else 1.0
    return {config: times_as_fast(found, change) for config, found in searched.items()} | {**played}


def times_as_fast(found: Measured, factor: float) -> Measured:
    """The figures of a config on a machine that is `factor` times as fast."""
    low, high = found.samples_per_s_ci
    return replace(
        found,
        samples_per_s=found.samples_per_s * factor,
        samples_per_s_ci=(low * factor, high * factor),
        step_s=found.step_s / factor,
    )


def measured(config: Config, outcomes: Iterable[Outcome]) -> Measured:
    """The throughput over fresh processes of a config, with the interval between them. At least one must have run.

    Processes that other work disturbed count only for the peak, unless all were disturbed.
    """
    ran = [outcome for outcome in outcomes if outcome.measurement]
    counted = undisturbed(ran) or ran
    found = [outcome.measurement for outcome in counted if outcome.measurement]
    if len(found) == 1:
        speed, low, high = found[0].samples_per_s, found[0].samples_per_s_low, found[0].samples_per_s_high
    else:
        speed, low, high = ratio_interval([math.log(measurement.samples_per_s) for measurement in found])
    more = NORMAL_95 * min(map(unrest, counted))
    below, above = (math.hypot(math.log(edge / speed), more) for edge in (low, high))
    return Measured(
        config=config.as_dict(),
        samples_per_s=speed,
        samples_per_s_ci=(speed * math.exp(-below), speed * math.exp(above)) if more else (low, high),
        peak_bytes=max(outcome.measurement.peak_bytes for outcome in ran if outcome.measurement),
        step_s=median(one.step_s * one.samples_per_s for one in found) / speed,  # a step's samples, at that speed
        num_processes=len(ran),
        **energy_of(outcome for outcome in ran),
    )


def energy_of(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """The energy of a sample over fresh processes of a config, with the interval between them: fields of a `Measured`; empty if unknown."""
    found = [
        m.joules_per_sample for outcome in outcomes if (m := outcome.measurement) and m.joules_per_sample is not None
    ]
    if not found:
        return {}
    joules, low, high = ratio_interval(list(map(math.log, found)))
    return {"joules_per_sample": joules, "joules_per_sample_ci": (low, high)}
