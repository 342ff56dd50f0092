"""An answer as plain text: in two lines, and as `autotune search` prints it."""

from __future__ import annotations

from autotune.records.result import Result
from autotune.report.answer import answer_sections
from autotune.report.figures import rate, times
from autotune.report.gain import said_of
from autotune.report.terminal import as_text
from autotune.techniques import find_techniques
from autotune.units import format_bytes


def in_short(result: Result) -> str:
    """`faster: 1.87x the baseline (95% interval 1.81x to 1.93x), with 0.81x its memory`, and the config."""
    found, gain = said_of(result), ""
    if result.baseline is not None and found.gain:
        sure = f" ({found.sure})" if found.sure else ""
        gain = f": {found.gain} the baseline{sure}, with {times(result.peak_bytes / result.baseline.peak_bytes)} its memory"
    figures = f"{rate(result.samples_per_s)} samples/s, {format_bytes(result.peak_bytes)}"
    return f"{found.verdict}{gain}\n{find_techniques().describe(result.config)}: {figures}; summary() tells the rest"


def page(result: Result, width: int) -> str:
    """The whole answer, as `autotune search` prints it."""
    return as_text(answer_sections(result, find_techniques(), model=result.subject.model), width)
