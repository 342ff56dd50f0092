"""Figures as people read them: throughput, intervals, ratios, counts, and what is said of an answer's speed over the baseline.

Every view takes them from here, so that all views say the same.

A gain is given as a figure only where several rounds agree on it, or where one pair of processes showed it. The interval of a ratio is
told by its ends; of one wider than a factor of two, on one side of 1, only by the end that counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.records.measured import Measured
from autotune.records.objective import OBJECTIVES
from autotune.records.outcome import Kind, Measurement
from autotune.records.result import EnergyUse, Ranking, Result
from autotune.records.scaling import OnDevices
from autotune.records.study import Prediction
from autotune.units import format_bytes

MENTIONED_BELOW = 0.95  # a higher chance to fit is not mentioned
NOISY = "noisy"  # stands in place of an interval too wide to mean anything
NOISY_SPREAD = 0.5  # an interval is noisy where half its width is more than this share of the value
PROBABLY = 1.02  # an unsure gain above this is called probable
THROUGHPUT, ENERGY, TRAINING = "throughput", "energy a sample", "throughput over the whole training, compiling included"
WIDE_FACTOR = 2.0  # an interval whose ends differ by more than this factor is told as a bound


def rate(samples_per_s: float) -> str:
    """`84.1`, `1,240`, `0.052`: three significant figures or all digits before the point."""
    if samples_per_s >= 100:
        return f"{samples_per_s:,.0f}"
    return f"{samples_per_s:.1f}" if samples_per_s >= 10 else f"{samples_per_s:.3g}"


def spread(value: float, low: float, high: float) -> str:
    """Half the width of an interval as a share of the value: `±1.2%`, `±23%`, or `noisy`; empty for an endless one."""
    if not (value > 0 and math.isfinite(high)):
        return ""
    half = (high - low) / 2 / value
    if half > NOISY_SPREAD:
        return NOISY
    return f"±{half:.0%}" if half >= 0.1 else f"±{half:.1%}"


def measured_rate(found: Measured | Measurement | OnDevices) -> str:
    """`84.1 ±1.2%`."""
    if isinstance(found, Measurement):
        low, high = found.samples_per_s_low, found.samples_per_s_high
    else:
        low, high = found.samples_per_s_ci
    return f"{rate(found.samples_per_s)} {spread(found.samples_per_s, low, high)}".rstrip()


def measured_joules(found: Measured | OnDevices) -> str:
    """`0.52 ±3.1%`, in joules a sample; a dash where that is not known."""
    if found.joules_per_sample is None:
        return "-"
    low, high = found.joules_per_sample_ci or (found.joules_per_sample,) * 2
    return f"{rate(found.joules_per_sample)} {spread(found.joules_per_sample, low, high)}".rstrip()


def expected(prediction: Prediction | None) -> str:
    """`expected 72.1 (65.0 to 80.2) samples/s, 600 MiB, 45% to win`, as far as anything was predicted; else empty."""
    if prediction is None:
        return ""
    parts = []
    if (
        prediction.samples_per_s is not None
        and prediction.samples_per_s_low is not None
        and prediction.samples_per_s_high
    ):
        low, high = rate(prediction.samples_per_s_low), rate(prediction.samples_per_s_high)
        parts.append(f"{rate(prediction.samples_per_s)} ({low} to {high}) samples/s")
    if prediction.peak_bytes is not None:
        parts.append(format_bytes(prediction.peak_bytes))
    if prediction.chance_to_win is not None:
        parts.append(f"{prediction.chance_to_win:.0%} to win")
    if prediction.chance_to_fit < MENTIONED_BELOW:
        parts.append(f"{prediction.chance_to_fit:.0%} to fit")
    return f"expected {', '.join(parts)}" if parts else ""


def limit_words(objective: str, memory_limit_bytes: int, headroom: float) -> str:
    """`throughput within 1.46 GiB, 5% of it kept free`."""
    return f"{objective} within {format_bytes(memory_limit_bytes)}, {headroom:.0%} of it kept free"


def times(ratio: float | None) -> str:
    """`1.87x`; a dash where nothing was measured."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def interval(low: float, high: float) -> str:
    """`1.81x to 1.93x`; an end that two digits would put at 1, though all of the interval lies on one side of it, is told in words."""
    above = "just above 1x" if low > 1 and times(low) == times(1) else times(low)
    below = "just below 1x" if high < 1 and times(high) == times(1) else times(high)
    return f"{above} to {below}"


def counts(outcomes: Mapping[str, int]) -> str:
    """`20 ok, 3 oom, 1 timeout`, in the order of `Kind`."""
    return ", ".join(f"{outcomes[kind]} {kind}" for kind in Kind if outcomes.get(kind))


def role_of(result: Result) -> str:
    """What an answer is called beside other configs."""
    return "best so far" if result.doubt else "answer"


@dataclass(frozen=True)
class Said:
    """The parts of the sentence on a gain.

    Attributes:
        verdict: `faster in the one round there was time for`; begins in lower case.
        brief: the verdict in a table.
        gain: `1.98x` or `at least 1.31x`; empty where there is none, because the baseline is the answer or did not run.
        of: what it is a gain of: the baseline's `THROUGHPUT`, `ENERGY`, or throughput over the whole `TRAINING`.
        sure: how sure the gain is; empty where that is not known.
    """

    verdict: str
    brief: str
    gain: str = ""
    sure: str = ""
    of: str = THROUGHPUT


def said_of(result: Result) -> Said:
    """What to say of an answer's gain, by what was searched for: its energy, or else its speed."""
    objective = OBJECTIVES[result.goal.objective]
    better, worse = (objective.better, objective.worse) if objective.observed else ("faster", "slower")
    if result.baseline is None or result.speedup is None:
        runs = "runs where the baseline does not" if result.verdict == better else "runs; the baseline did not"
        return Said(runs, "runs" if result.verdict == better else result.verdict)
    if result.config == result.baseline.config:
        return Said(result.verdict, result.verdict)
    ratio, ends, of = result.speedup, result.speedup_ci, ENERGY if objective.is_thrift else THROUGHPUT
    if (whole := result.play_off.training_speedup) is not None:
        ratio, ends, of = whole[0], whole[1:], TRAINING
    if objective.is_thrift:
        ratio, ends = result.energy.energy_ratio or 1.0, result.energy.energy_ratio_ci
    verdict, brief = result.verdict, result.verdict
    single = not result.play_off.confirmed or result.play_off.num_rounds == 1
    if verdict == "undecided":
        likely = (1 / ratio if objective.is_thrift else ratio) > PROBABLY and not (ends and tells_nothing(*ends))
        verdict = f"probably {better}" if likely else f"undecided whether {better} or {worse}"
    elif verdict == "same":
        verdict = f"as {'good' if objective.observed else 'fast'} as the baseline within the noise"
    elif single:
        verdict, brief = f"{verdict} in the one round there was time for", f"{verdict} in one round"
    later = ends is not None and result.verdict in (better, worse) and ends[0] <= 1 <= ends[1]
    if later and not single:  # the rounds say so, and what later runs differ by leaves it open
        verdict = f"{verdict} in this search"
    gain, sure = times(ratio), ""
    if ends is not None and is_known(*ends):
        sure = f"95% interval {'of later runs ' if later else ''}{interval(*ends)}"
        if tells_nothing(*ends):
            sure = "too noisy to tell more"
        elif is_wide(*ends) and not result.play_off.confirmed and ends[0] <= 1 <= ends[1]:
            sure = ""  # without a play-off its chance is told, which rests on more than these ends
        elif end := bound(*ends):
            gain, sure = (gain, end) if single else (end, "95% sure")
    elif ends is not None:
        sure = "from one round, so its interval is unknown"
    if objective.observed and (not objective.is_thrift or result.energy.energy_ratio is None):
        return Said(verdict, brief)  # no round has compared it, or no figure of the answer tells it
    return Said(verdict, brief, gain, sure, of)


def is_known(low: float, high: float) -> bool:
    """Whether an interval has ends. Earlier versions wrote intervals without ends where there was one round."""
    return low > 0 and high != float("inf")


def is_wide(low: float, high: float) -> bool:
    """Whether an interval is wider than a factor of two."""
    return high > WIDE_FACTOR * low


def tells_nothing(low: float, high: float) -> bool:
    """Whether both half the figure and a gain lie within an interval, so that neither of its ends counts."""
    return is_known(low, high) and low * WIDE_FACTOR < 1 < high


def bound(low: float, high: float) -> str:
    """The end that counts of a wide interval: `at least 1.31x`, or `at most 0.52x` where all of it is a loss.

    Empty for one that is not wide, and for one that two digits cannot tell from one around 1: both of its ends count.
    """
    if not is_wide(low, high):
        return ""
    if low > 1 and times(low) != times(1):
        return f"at least {times(low)}"
    return f"at most {times(high)}" if high < 1 and times(high) != times(1) else ""


def gain_in_table(found: Result | Ranking, energy: EnergyUse | Ranking, objective: str) -> str:
    """`1.87x (1.81x to 1.93x)`, `at least 1.31x`, `1.16x noisy`, or a dash; where energy was searched for, `0.92x energy (0.90x to 0.94x)`.

    Args:
        energy: where the energy of `found` stands.
    """
    ratio, ends, of = found.speedup, found.speedup_ci, ""
    if OBJECTIVES[objective].is_thrift:
        is_kept = ratio == 1 and ends is None  # as it is told where the answer is the baseline
        ratio, ends, of = 1.0 if is_kept else energy.energy_ratio, energy.energy_ratio_ci, " energy"
    if ratio is None:
        return times(ratio)
    told = f"{times(ratio)}{of}"
    if ends is None or not is_known(*ends):
        return told
    if tells_nothing(*ends):
        return f"{told} {NOISY}"
    if end := bound(*ends):
        return f"{end}{of}"
    return f"{told} ({interval(*ends)})"
