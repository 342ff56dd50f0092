"""An answer as plain text: in two lines, and as `autotune search` prints it."""

from __future__ import annotations

from autotune.records.result import Result
from autotune.report.answer import answer_sections
from autotune.report.figures import interval, rate, times
from autotune.report.terminal import as_text
from autotune.techniques.labels import describe
from autotune.units import format_bytes


def in_short(result: Result) -> str:
    """`faster: 1.87x the baseline (95% interval 1.81x to 1.93x), with 0.81x its memory`, and the config."""
    gain = ": the baseline did not run" if result.baseline is None else ""
    if result.baseline is not None and result.speedup is not None and result.config != result.baseline.config:
        sure = f" (95% interval {interval(*result.speedup_ci)})" if result.speedup_ci else ""
        memory = times(result.peak_bytes / result.baseline.peak_bytes)
        gain = f": {times(result.speedup)} the baseline{sure}, with {memory} its memory"
    figures = f"{rate(result.samples_per_s)} samples/s, {format_bytes(result.peak_bytes)}"
    return f"{result.verdict}{gain}\n{describe(result.config)}: {figures}; summary() tells the rest"


def page(result: Result, width: int) -> str:
    """Everything that is told of an answer."""
    return as_text(answer_sections(result, model=result.model), width)
