"""How far a gain that is seen in a later run lies from the gain that a search told.

The pairs of a play-off say how much equal processes differ within one search. They cannot say how much the machine differs between
the search and the hour after it. That is learned from `Recheck`s, each of which holds a gain that was told and the same gain seen
later. The variance between occasions follows by the method of moments from what the two noises leave unexplained (DerSimonian and
Laird, Meta-analysis in clinical trials, Controlled Clinical Trials 7, 1986), beside a prior that weighs as much as `PRIOR_DF` exact
rechecks. A square's variance grows with the square of what it is expected to be, so a recheck of a gain that was told or seen with much
noise weighs little. Rechecks of one answer share the gain that was told, and its error: together they weigh as much as one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import fmean, variance

from autotune.records.measured import NORMAL_95
from autotune.records.outcome import Outcome
from autotune.records.recheck import Recheck
from autotune.records.result import Result
from autotune.study.figures import undisturbed
from autotune.tuning.entrant import Ratio, samples_per_s

PRIOR_STD = 0.03  # of the logarithm of a gain between two occasions, before any recheck on this machine
PRIOR_DF = 4.0  # rechecks without noise that the prior weighs as much as
LEAST_STD = 0.005  # no machine is trusted to repeat a gain more closely
ALONE_STD = 0.02  # between equal processes, where a recheck has one of each


def later_std(rechecks: Sequence[Recheck]) -> float:
    """The standard deviation of the logarithm of a gain between a search and a later run."""
    of_answer = Counter(map(_answer_of, rechecks))
    weights = [(PRIOR_STD**2 / (PRIOR_STD**2 + _noise(one))) ** 2 / of_answer[_answer_of(one)] for one in rechecks]
    unexplained = sum(
        weight * (_difference(recheck) ** 2 - _noise(recheck))
        for weight, recheck in zip(weights, rechecks, strict=True)
    )
    found = (PRIOR_DF * PRIOR_STD**2 + unexplained) / (PRIOR_DF + sum(weights))
    return max(LEAST_STD, math.sqrt(max(0.0, found)))


def widen(gain: Ratio, std: float) -> Ratio:
    """A gain with the interval that a later run will be in: that of the pairs, and the difference between occasions beside it."""
    told, low, high = gain
    below, above = (math.hypot(math.log(edge / told), NORMAL_95 * std) for edge in (low, high))
    return told, told * math.exp(-below), told * math.exp(above)


def recheck_answer(answer: Result, ran: Sequence[Outcome], beside: Sequence[Outcome]) -> Recheck | None:
    """What later processes of an answer saw of its gain; None where there is no gain to see again, or one of them failed.

    Args:
        ran, beside: the processes of the answer and of the baseline, in turns. Disturbed ones do not count.
    """
    if not all(outcome.ok for outcome in (*ran, *beside)):
        return None
    logs, base_logs = ([math.log(samples_per_s(outcome)) for outcome in undisturbed(runs)] for runs in (ran, beside))
    told_ci = answer.play_off.paired_ci or answer.speedup_ci
    if not logs or not base_logs or answer.speedup is None or told_ci is None:
        return None
    return Recheck(
        checked_at=datetime.now(UTC).isoformat(timespec="seconds"),
        told_speedup=answer.speedup,
        told_speedup_ci=told_ci,
        told_speedup_std=answer.play_off.paired_std,
        speedup=math.exp(fmean(logs) - fmean(base_logs)),
        speedup_std=math.hypot(*(_std_of_mean(found) for found in (logs, base_logs))),
        samples_per_s=math.exp(fmean(logs)),
        told_samples_per_s=answer.samples_per_s,
    )


def _std_of_mean(logs: Sequence[float]) -> float:
    spread = math.sqrt(variance(logs)) if len(logs) > 1 else ALONE_STD
    return spread / math.sqrt(len(logs))


def _answer_of(recheck: Recheck) -> tuple[float, float]:
    """What tells answers apart: no two searches measure the same figures."""
    return recheck.told_speedup, recheck.told_samples_per_s


def _difference(recheck: Recheck) -> float:
    return math.log(recheck.speedup / recheck.told_speedup)


def _noise(recheck: Recheck) -> float:
    """The variance of a difference that the two measurements explain by themselves."""
    low, high = recheck.told_speedup_ci
    told_std = recheck.told_speedup_std
    if told_std is None:
        told_std = math.log(high / low) / 2 / NORMAL_95
    return float(told_std**2 + recheck.speedup_std**2)
