"""What warm-up steps tell of the typical step, and of compiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median


@dataclass(frozen=True)
class WarmStep:
    """A warm-up step.

    Attributes:
        micro_s: seconds of one micro batch.
        update_s: seconds of the update.
        compiled: something was compiled in it, so it does not tell the speed.
        num_micro: micro batches that it took.
        is_typical: its batches are like those of training, and not the largest where batches differ.
    """

    micro_s: float
    update_s: float
    compiled: bool = False
    num_micro: int = 1
    is_typical: bool = True

    def after(self, data_s: float) -> WarmStep:
        """The step with so many seconds of waiting for each micro batch."""
        return replace(self, micro_s=self.micro_s + data_s)

    def whole_s(self, accumulation_steps: int) -> float:
        """Seconds of an optimizer step of so many micro batches."""
        return accumulation_steps * self.micro_s + self.update_s


def telling_steps(steps: Sequence[WarmStep]) -> list[WarmStep]:
    """Those that tell the speed: without the first, which is cold, those that are not typical, and those that compiled."""
    later = [step for step in steps[1:] if step.is_typical]
    return [step for step in later if not step.compiled] or later


def typical_step(steps: Sequence[WarmStep]) -> WarmStep:
    """The typical step, of those that tell the speed."""
    later = telling_steps(steps)
    return WarmStep(median(step.micro_s for step in later), median(step.update_s for step in later))


def compile_s_of(steps: Sequence[WarmStep]) -> float:
    """Seconds that the first step, and each step that compiled, took beyond a typical step of as many micro batches."""
    usual = typical_step(steps)
    beyond_s = (
        step.num_micro * (step.micro_s - usual.micro_s) + step.update_s - usual.update_s
        for step in steps
        if step.compiled or step is steps[0]
    )
    return sum(max(0.0, seconds) for seconds in beyond_s)
