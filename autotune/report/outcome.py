"""One probe's outcome for people: what `autotune probe` and `autotune verify` print."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.records.config import Choice
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.units import format_bytes, format_seconds


def render_outcome(outcome: Outcome, config: Mapping[str, Choice], console: Console) -> None:
    """Print an outcome: the figures of one that ran, the cause and the log of one that did not."""
    console.print(f"config   {dict(config)}", soft_wrap=True, markup=False)
    if outcome.measurement is None:
        console.print(
            f"outcome  {outcome.kind}: {outcome.cause} (during {outcome.stage})", soft_wrap=True, markup=False
        )
        if outcome.detail and outcome.kind is not Kind.OOM:
            console.print(outcome.detail.rstrip(), soft_wrap=True, markup=False)
    else:
        console.print("outcome  ok")
        console.print(_figures(outcome.measurement))
    if outcome.log:
        console.print(f"log      {outcome.log}", soft_wrap=True, markup=False)


def _figures(found: Measurement) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "throughput": f"{found.samples_per_s:.4g} samples/s (95 % {found.samples_per_s_low:.4g} to {found.samples_per_s_high:.4g})",
        "optimizer step": format_seconds(found.step_s),
        "peak memory": format_bytes(found.peak_bytes),
        "steps": f"{found.num_steps}, warm-up included"
        + (f"; GradScaler skipped {found.skipped_steps}" if found.skipped_steps else ""),
        "time": f"setup {format_seconds(found.setup_s)}, warm-up {format_seconds(found.warmup_s)}, "
        f"timed {format_seconds(found.timed_s)}",
        "a step": ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in found.phases_s.items()),
        "last loss": f"{found.final_loss:.4g}",
    }
    if found.growth_bytes_per_step:
        rows["leak"] = f"memory grows by {format_bytes(found.growth_bytes_per_step)} per optimizer step"
    if found.disturbances:
        rows["disturbed"] = "; ".join(found.disturbances)
    for name, text in rows.items():
        table.add_row(name, Text(text))
    return table
