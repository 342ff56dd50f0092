"""Views of a running search: a live table on a terminal, one line per probe elsewhere. They never raise into it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from autotune.records.config import Config
from autotune.records.outcome import Outcome
from autotune.records.progress import Progress
from autotune.report.figures import expected, measured_rate
from autotune.techniques.labels import describe
from autotune.tuning.events import Event, Listener, Note, ProbeEnded, SearchStarted
from autotune.units import format_bytes, format_seconds, plural


def live_listener(stream: TextIO, *, quiet: bool) -> Listener:
    """The view that suits a stream, which should be stderr.

    A live table on a terminal (none with `TERM=dumb`), one plain line a probe elsewhere, warnings alone when `quiet`.
    `NO_COLOR` is honoured.
    """
    if quiet:
        return WarningsOnly(stream)
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        from autotune.report.dashboard import Dashboard

        return Dashboard(stream)
    return Lines(stream)


def watching(listeners: Sequence[Listener] | None) -> Sequence[Listener]:
    """Who watches a search from Python: the listeners given, none of them where there are none, else the view that suits stderr."""
    if listeners is not None:
        return listeners
    return [] if sys.stderr is None else [live_listener(sys.stderr, quiet=False)]  # pythonw has no stderr


class WarningsOnly(Listener):
    """Prints warnings, a line each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def on(self, event: Event) -> None:
        """Print what this view prints of an event; an event or a stream that fails is left alone."""
        with contextlib.suppress(Exception):  # a view must not end a search, e.g. by a closed pipe
            for line in self.lines(event):
                self._stream.write(line + "\n")
            self._stream.flush()

    def lines(self, event: Event) -> list[str]:
        """The lines to print for an event."""
        return [f"warning: {event.text}"] if isinstance(event, Note) and event.warning else []


class Lines(WarningsOnly):
    """One plain line a probe, and the notes between them."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._budget_s = 0.0

    def lines(self, event: Event) -> list[str]:
        """The start of the search, every note and every finished probe."""
        if isinstance(event, SearchStarted):
            self._budget_s = event.budget_s
            return introduction(event)
        if isinstance(event, ProbeEnded):
            return [self._probe(event)]
        if isinstance(event, Note) and not event.warning:
            return [f"note: {event.text}"]
        return super().lines(event)

    def _probe(self, event: ProbeEnded) -> str:
        clock = f"[{event.elapsed_s:4.0f}/{self._budget_s:.0f}s]"
        trial = event.trial
        found = f"{describe(trial.config)}: {summary(trial.outcome, feasible=trial.feasible)}"
        best = " (best)" if is_best(event) and trial.stage != "baseline" else ""
        before = f" [{expected(trial.prediction)}]" if expected(trial.prediction) else ""
        return f"{clock} #{trial.number} {trial.stage:8} {found}{best}{before}"


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


def advanced(progress: Progress) -> str:
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
