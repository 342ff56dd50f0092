"""What is said of an answer's speed over the baseline. It is decided here alone, so that every view says the same.

A gain is a figure only where it was measured so: several rounds agree on it, or it is what one pair of processes showed. An
interval wider than a factor of two leaves nothing but its end that counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.result import Result
from autotune.report.figures import NOISY, interval, times

PROBABLY = 1.02  # a gain that is not sure is said to be likely from here
WIDE_FACTOR = 2.0  # the ratio of an interval's ends from which it is a bound


@dataclass(frozen=True)
class Said:
    """The parts of the sentence on a gain.

    Attributes:
        verdict: `faster in the one round there was time for`; begins in lower case.
        brief: the same in a table.
        gain: `1.98x` or `at least 1.31x`; empty where there is none: the baseline is the answer, or did not run.
        sure: how sure that is; empty where nothing is known of it.
    """

    verdict: str
    brief: str
    gain: str = ""
    sure: str = ""


def said_of(result: Result) -> Said:
    """What is said of an answer."""
    if result.baseline is None or result.speedup is None:
        runs = "runs where the baseline does not" if result.verdict == "faster" else "runs; the baseline did not"
        return Said(runs, "runs" if result.verdict == "faster" else result.verdict)
    if result.config == result.baseline.config:
        return Said(result.verdict, result.verdict)
    verdict, brief = result.verdict, result.verdict
    single = not result.play_off.confirmed or result.play_off.num_rounds == 1
    if verdict == "undecided":
        likely = result.speedup > PROBABLY and not (result.speedup_ci and tells_nothing(*result.speedup_ci))
        verdict = "probably faster" if likely else "undecided whether faster or slower"
    elif verdict == "same":
        verdict = "as fast as the baseline within the noise"
    elif single:
        verdict, brief = f"{verdict} in the one round there was time for", f"{verdict} in one round"
    gain, sure = times(result.speedup), ""
    if (ends := result.speedup_ci) is not None and is_known(*ends):
        sure = f"95% interval {interval(*ends)}"
        if tells_nothing(*ends):
            sure = "too noisy to tell more"
        elif is_wide(*ends):  # a bound alone would hide what was seen where it may be a gain or a loss
            is_open = single or ends[0] <= 1 <= ends[1]
            gain, sure = (gain, bound(*ends)) if is_open else (bound(*ends), "95% sure")
    elif ends is not None:
        sure = "from one round, so its interval is unknown"
    return Said(verdict, brief, gain, sure)


def is_known(low: float, high: float) -> bool:
    """Whether an interval has ends; in answers of earlier versions, that of one round has none."""
    return low > 0 and high != float("inf")


def is_wide(low: float, high: float) -> bool:
    """Whether an interval is wider than a factor of two."""
    return high > WIDE_FACTOR * low


def tells_nothing(low: float, high: float) -> bool:
    """Whether half the speed and a gain are both within an interval, so that neither of its ends counts."""
    return is_known(low, high) and low * WIDE_FACTOR < 1 < high


def bound(low: float, high: float) -> str:
    """The end of a wide interval that counts: `at least 1.31x`; where all of it is a loss, `at most 0.52x`."""
    return f"at most {times(high)}" if high < 1 else f"at least {times(low)}"


def gain_in_table(speedup: float | None, ends: tuple[float, float] | None) -> str:
    """`1.87x`, `at least 1.31x`, `1.16x noisy`, or a dash."""
    if ends is not None and tells_nothing(*ends):
        return f"{times(speedup)} {NOISY}"
    return bound(*ends) if ends is not None and is_known(*ends) and is_wide(*ends) else times(speedup)
