"""A running search in words, for whichever view shows it."""

from __future__ import annotations

from autotune.records.config import Config
from autotune.records.outcome import Outcome, Progress
from autotune.report.figures import measured_rate
from autotune.tuning.events import ProbeEnded, SearchStarted
from autotune.units import format_bytes, format_seconds, plural


def introduction(event: SearchStarted) -> list[str]:
    """The task, the limits and the file of the study; then the space: `batch_size (7), amp (2): 14 configs`."""
    free = [f"{name} ({len(choices)})" for name, choices in event.space.items() if len(choices) > 1]
    known = f", {plural(len(event.known), 'probe')} known" if event.known else ""
    return [
        f"{event.task} on {event.device}: {event.objective} within {format_bytes(event.memory_limit_bytes)} "
        f"({event.headroom:.0%} of it kept free), budget {format_seconds(event.budget_s)}; "
        f"study {event.storage.removeprefix('sqlite:///')}{known}",
        f"searching {', '.join(free) or 'nothing but the baseline'}: {plural(event.num_configs, 'config')}",
    ]


def summary(outcome: Outcome, *, feasible: bool) -> str:
    """`84.1 samples/s ±1.2%, 612 MiB`, or how the probe failed and why, on one line."""
    found = outcome.measurement
    if found is None:
        return " ".join(f"{outcome.kind}: {outcome.cause}".split()) if outcome.cause else str(outcome.kind)
    speed, _, noise = measured_rate(found).partition(" ")
    return f"{speed} samples/s {noise}, {format_bytes(found.peak_bytes)}{'' if feasible else ', not feasible'}"


def describe_progress(progress: Progress) -> str:
    """`setting up`, `warming up`, `timing: 12 micro steps, 612 MiB`: how far a running probe has come."""
    stage = {"setup": "setting up", "warmup": "warming up"}.get(progress.stage, progress.stage)
    if not progress.num_micro_steps:
        return stage
    return f"{stage}: {plural(progress.num_micro_steps, 'micro step')}, {format_bytes(progress.peak_bytes)}"


def is_best(event: ProbeEnded) -> bool:
    """Whether this very probe is the best so far."""
    return event.best is not None and event.best == (event.trial.config, event.trial.outcome)


def best_speed(best: tuple[Config, Outcome] | None, baseline: Outcome | None) -> float | None:
    """Throughput of the best so far over the baseline's, as single processes saw them; None where something disturbed one."""
    if best is None or baseline is None or best[1].measurement is None or baseline.measurement is None:
        return None
    if best[1].disturbances or baseline.disturbances:
        return None
    return best[1].measurement.samples_per_s / baseline.measurement.samples_per_s
