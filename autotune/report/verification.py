"""What a later run says of a study's answer: whether it is as fast as the study told, and what was seen of its gain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autotune.records.measured import NORMAL_95
from autotune.records.outcome import Outcome
from autotune.records.recheck import Recheck
from autotune.records.result import Result
from autotune.report.figures import interval, is_known, rate, times
from autotune.report.sections import Paragraph, Section, Span, Tone


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A later run of a study's answer.

    Attributes:
        study: its name.
        outcome: of the later run.
        seen: what was seen of the gain; None where there is none, or something failed.
        elsewhere: how the study's device differs from this one, in words; empty where it does not.
        slower: share by which the answer may be slower than it was.
    """

    study: str
    answer: Result
    outcome: Outcome
    seen: Recheck | None
    elsewhere: str
    slower: float

    @property
    def least_samples_per_s(self) -> float:
        """The throughput that is expected at least."""
        return self.answer.samples_per_s * (1 - self.slower)

    @property
    def holds(self) -> bool:
        """Whether the answer may well be as fast as that."""
        found = self.outcome.measurement
        return found is not None and found.samples_per_s_high >= self.least_samples_per_s

    def finding(self) -> Iterator[str]:
        """What was found, in sentences; nothing on a run that failed."""
        if (found := self.outcome.measurement) is None:
            return
        ends = f"95% {rate(found.samples_per_s_low)} to {rate(found.samples_per_s_high)}"
        least = f"{rate(self.least_samples_per_s)} ({rate(self.answer.samples_per_s)} less {self.slower:.0%})"
        yield (
            f"The answer of {self.study} {self._verdict()}: {rate(found.samples_per_s)} samples/s ({ends}), expected at least "
            f"{least}{self._advice()}."
        )
        if (seen := self.seen) is not None:
            low, high = (seen.speedup * math.exp(z * seen.speedup_std) for z in (-NORMAL_95, NORMAL_95))
            told = _gain(seen.told_speedup, *self.answer.speedup_ci or seen.told_speedup_ci)
            yield (
                f"In turns with the baseline, at {rate(seen.samples_per_s / seen.speedup)} samples/s, the answer ran at "
                f"{rate(seen.samples_per_s)}: {_gain(seen.speedup, low, high)}. The study told {told}."
            )
        if self.answer.speedup is None:
            yield "The baseline did not run in that search, so there is no gain to see again."

    def sections(self) -> Iterator[Section]:
        """The finding, for a reader."""
        if told := [*self.finding()]:
            tone = Tone.GOOD if self.holds else Tone.FAILED
            yield Section("Against the study", (Paragraph(Span(told[0], tone)), *map(Paragraph, told[1:])))

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain JSON-ready data."""
        recheck = {} if self.seen is None else {"recheck": self.seen.to_dict()}
        return {
            "expected_samples_per_s": self.least_samples_per_s,
            "holds": self.holds,
            "finding": list(self.finding()),
            **recheck,
        }

    def _verdict(self) -> str:
        if self.elsewhere:
            return f"was {'' if self.holds else 'not '}reached on another device than the study's"
        if self.holds:
            return "holds"
        return "was not reached while other work disturbed it" if self._disturbed else "no longer holds"

    def _advice(self) -> str:
        if self.holds:
            return ""
        if self.elsewhere:
            return "; verify it there, or search here"
        return f"; {'verify it on a quiet machine' if self._disturbed else 'search again'}"

    @property
    def _disturbed(self) -> bool:
        return self.outcome.measurement is not None and bool(self.outcome.measurement.disturbances)


def _gain(ratio: float, low: float, high: float) -> str:
    """`1.73x (95% interval 1.70x to 1.77x)`."""
    return f"{times(ratio)} (95% interval {interval(low, high)})" if is_known(low, high) else times(ratio)
