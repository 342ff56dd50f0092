"""Views of a running search: a live table on a terminal, one line per probe elsewhere. They never raise into it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from autotune.report.figures import expected
from autotune.report.progress import introduction, is_best, summary
from autotune.techniques import Techniques
from autotune.tuning.events import Event, Listener, Note, ProbeEnded, SearchStarted


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


def listeners_of(listeners: Sequence[Listener] | None) -> Sequence[Listener]:
    """Who watches a search from Python: the listeners that were given, which may be none, else the view that suits stderr."""
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
        self._budget_s, self._techniques = 0.0, Techniques(())

    def lines(self, event: Event) -> list[str]:
        """The start of the search, every note and every finished probe."""
        if isinstance(event, SearchStarted):
            self._budget_s, self._techniques = event.budget_s, event.techniques
            return introduction(event)
        if isinstance(event, ProbeEnded):
            return [self._probe(event)]
        if isinstance(event, Note) and not event.warning:
            return [f"note: {event.text}"]
        return super().lines(event)

    def _probe(self, event: ProbeEnded) -> str:
        clock = f"[{event.elapsed_s:4.0f}/{self._budget_s:.0f}s]"
        trial = event.trial
        found = f"{self._techniques.describe(trial.config)}: {summary(trial.outcome, feasible=trial.feasible)}"
        best = " (best)" if is_best(event) and trial.stage != "baseline" else ""
        before = f" [{expected(trial.prediction)}]" if expected(trial.prediction) else ""
        return f"{clock} #{trial.number} {trial.stage:8} {found}{best}{before}"
