"""One probe's outcome as sections, for `autotune probe` and `autotune verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.records.config import Choice
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.report.figures import rate
from autotune.report.sections import Cell, Code, Section, Span, Tone, pairs
from autotune.units import format_bytes, format_seconds


def outcome_sections(outcome: Outcome, config: Mapping[str, Choice]) -> Iterator[Section]:
    """The figures of a probe that ran, the cause and the log of one that did not."""
    rows: dict[str, Cell] = {"config": str(dict(config))}
    if outcome.measurement is None:
        rows["outcome"] = Span(f"{outcome.kind}: {outcome.cause} (during {outcome.stage})", Tone.BAD)
    else:
        rows |= {"outcome": Span("ok", Tone.GOOD), **_figures(outcome.measurement)}
    if outcome.log:
        rows["log"] = outcome.log
    yield Section("", (pairs(rows),))
    if outcome.measurement is None and outcome.detail and outcome.kind is not Kind.OOM:
        yield Section("In detail", tuple(Code(line) for line in outcome.detail.rstrip().splitlines()))


def _figures(found: Measurement) -> dict[str, Cell]:
    low, high = found.samples_per_s_low, found.samples_per_s_high
    sure = f" (95% {rate(low)} to {rate(high)})" if low < high else ""  # one block has no interval
    times_s = {"setup": found.setup_s, "warm-up": found.warmup_s, "timed": found.timed_s}
    skipped = f"; GradScaler skipped {found.skipped_steps}" if found.skipped_steps else ""
    rows: dict[str, Cell] = {
        "throughput": f"{rate(found.samples_per_s)} samples/s{sure}",
        "optimizer step": format_seconds(found.step_s),
        "peak memory": format_bytes(found.peak_bytes),
        "steps": f"{found.num_steps}, warm-up included{skipped}",
        "time": _seconds(times_s),
        "a step": _seconds(found.phases_s),
        "last loss": f"{found.final_loss:.4g}",
    }
    if found.compile_cold_s or found.compile_trouble:
        cold = f"{format_seconds(found.compile_cold_s)} with an empty cache, {format_seconds(found.compile_s)} from the cache"
        rows["compiling"] = "; ".join(filter(None, (cold if found.compile_cold_s else "", found.compile_trouble)))
    if found.growth_bytes_per_step:
        grown = format_bytes(found.growth_bytes_per_step)
        kept = f"; each micro batch leaves {found.kept}" if found.kept else ""
        rows["leak"] = f"memory grows by {grown} per optimizer step{kept}"
    if found.disturbances:
        rows["disturbed"] = "; ".join(found.disturbances)
    return rows


def _seconds(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())
