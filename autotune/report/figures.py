"""Figures as people read them: throughput, intervals, ratios, counts. Used by every view, so that they agree."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotune.records.measured import Measured
from autotune.records.outcome import Kind, Measurement
from autotune.records.study import Prediction
from autotune.units import format_bytes

MENTIONED_BELOW = 0.95  # chance to fit: a higher one is not mentioned
NOISY = "noisy"  # in place of an interval too wide to mean anything
NOISY_SPREAD = 0.5  # half the width of an interval, as a share of the value, from which it is noisy


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


def measured_rate(found: Measured | Measurement) -> str:
    """`84.1 ±1.2%`."""
    if isinstance(found, Measured):
        low, high = found.samples_per_s_ci
    else:
        low, high = found.samples_per_s_low, found.samples_per_s_high
    return f"{rate(found.samples_per_s)} {spread(found.samples_per_s, low, high)}".rstrip()


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
    """`1.87x`; a dash for what was not measured."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def interval(low: float, high: float) -> str:
    """`1.81x to 1.93x`."""
    return f"{low:.2f}x to {high:.2f}x"


def counts(outcomes: Mapping[str, int]) -> str:
    """`20 ok, 3 oom, 1 timeout`, in the order of `Kind`."""
    return ", ".join(f"{outcomes[kind]} {kind}" for kind in Kind if outcomes.get(kind))
