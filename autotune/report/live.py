"""Views of a running search: a live table on a terminal, one line per probe elsewhere. Their errors never reach the search."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autotune.records.config import Config
from autotune.records.measured import front_by
from autotune.records.outcome import Outcome, Progress
from autotune.records.study import Trial
from autotune.report.figures import counts, expected, measured_rate, rate, times
from autotune.study.place import shown_of
from autotune.techniques import Techniques
from autotune.tuning.events import (
    Event,
    Listener,
    Note,
    ProbeAdvanced,
    ProbeEnded,
    ProbeStarted,
    SearchStarted,
    Working,
)
from autotune.units import format_bytes, format_chance, format_seconds, plural

NUM_FRONT = 6
NUM_LAST = 5
REFRESHES_PER_S = 4
WORK = {
    "import": "importing torch and the model",
    "inspection": "measuring the device, and inspecting the model with small steps",
    "tracing": "tracing training steps, which predicts their memory",
    "checks": "comparing gradients with plain fp32",
    "one device": "training the baseline on one of the devices",
    "waiting": "waiting for what another search of the study runs",
    "evaluation": "finding the batch size for evaluation",
}
SPARE_LINES = 10  # taken by everything but the front and the last probes


def live_listener(stream: TextIO, *, quiet: bool) -> Listener:
    """The view that suits a stream, which should be stderr.

    A live table on a terminal (none with `TERM=dumb`), one plain line a probe elsewhere, warnings alone when `quiet`.
    `NO_COLOR` is honoured.
    """
    if quiet:
        return WarningsOnly(stream)
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        return Dashboard(stream)
    return Lines(stream)


def listeners_of(listeners: Sequence[Listener] | None) -> Sequence[Listener]:
    """The listeners of a search from Python: those given, be it an empty list, or else the view that suits stderr."""
    if listeners is not None:
        return listeners
    return [] if sys.stderr is None else [live_listener(sys.stderr, quiet=False)]  # pythonw has no stderr


class WarningsOnly(Listener):
    """Prints warnings, a line each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def on(self, event: Event) -> None:
        """Print this view's lines for an event; errors of the event or the stream are ignored."""
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
        sure = f", {format_chance(event.chance)} likely better than the baseline" if event.chance is not None else ""
        best = f" (best{sure})" if is_best(event) and trial.stage != "baseline" else ""
        before = f" [{expected(trial.prediction)}]" if expected(trial.prediction) else ""
        return f"{clock} #{trial.number} {trial.stage:8} {found}{best}{before}"


class Dashboard(Listener):
    """Running probe, best so far, baseline, front, last probes, time left. Disappears when the search ends; notes stay."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._began = time.monotonic()
        self._budget_s: float | None = None
        self._techniques = Techniques(())
        self._running: dict[str, ProbeStarted] = {}  # by slot
        self._since: dict[int, float] = {}  # by the number of the probe
        self._progress: dict[int, Progress] = {}
        self._best: tuple[Config, Outcome] | None = None
        self._baseline: Outcome | None = None
        self._chance: float | None = None  # that the best is better than the baseline
        self._feasible: dict[Config, Outcome] = {}
        self._last: deque[ProbeEnded] = deque(maxlen=NUM_LAST)
        self._outcomes: Counter[str] = Counter()
        self._purpose = "import"
        self._said: list[Text] = []
        self._width = self._console.width

    def __enter__(self) -> Listener:
        self._began = time.monotonic()
        with contextlib.suppress(Exception):
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(Exception):
            self._live.stop()

    def on(self, event: Event) -> None:
        """Take note of an event; the table follows at its next refresh."""
        with contextlib.suppress(Exception):  # a view must not end a search
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case SearchStarted():
                self._budget_s, self._techniques = event.budget_s, event.techniques
                self._best, self._baseline = event.best, event.baseline
                for seen in (self._feasible, self._last, self._outcomes):  # left by an earlier search
                    seen.clear()
                for trial in event.known:
                    self._count(trial)
                self._say(*map(Text, introduction(event)))
            case ProbeStarted():
                self._began = time.monotonic() - event.elapsed_s
                self._running[event.slot] = event
                self._since[event.number] = time.monotonic()
                self._purpose = ""
            case ProbeAdvanced():
                self._progress[event.number] = event.progress
            case ProbeEnded():
                running = self._running.items()
                self._running = {slot: one for slot, one in running if one.number != event.trial.number}
                self._best, self._baseline, self._chance = event.best, event.baseline, event.chance
                self._last.append(event)
                self._count(event.trial)
            case Working():
                self._purpose = event.purpose
            case Note():
                style = "yellow" if event.warning else "dim"
                self._say(Text(f"{'warning: ' if event.warning else ''}{event.text}", style=style))

    def _count(self, trial: Trial) -> None:
        self._outcomes[trial.outcome.kind] += 1
        if trial.feasible:
            self._feasible[trial.config] = trial.outcome
        else:
            self._feasible.pop(trial.config, None)

    def _say(self, *lines: Text) -> None:
        """Print lines that stay above the table."""
        self._said += lines
        for line in lines:
            self._console.print(line)

    def _render(self) -> RenderableType:
        # a separate thread draws while `on` runs: work on copies, and draw nothing rather than fail
        try:
            self._redraw_if_resized()
            return Group(*self._parts())
        except Exception:
            return Text("")

    def _redraw_if_resized(self) -> None:
        """After a resize begin with an empty screen: the terminal has rewrapped the old table, which cannot be overdrawn any more."""
        if self._console.width != self._width:
            self._width = self._console.width
            self._console.control(Control.clear(), Control.home())
            for line in self._said.copy():
                self._console.print(line)

    def _parts(self) -> list[RenderableType]:
        parts: list[RenderableType] = [Text(""), self._state(), Text("")]
        room = self._console.height - SPARE_LINES
        num_last = min(len(self._last), max(room // 3, 1))
        front = self._front()[-max(min(NUM_FRONT, room - num_last), 1) :]
        if front:
            parts += [self._front_table(front), Text("")]
        if num_last:
            parts += [self._last_table(list(self._last)[-num_last:]), Text("")]
        return [*parts, self._clock()]

    def _state(self) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(style="dim", width=8)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        running = [*self._running.copy().values()]
        for one in running:
            elapsed = format_seconds(max(1.0, time.monotonic() - self._since[one.number]))
            progress = self._progress.get(one.number)
            done = f", {describe_progress(progress)}" if progress else ""
            head = (f"#{one.number} {one.stage}, {elapsed}{done}  ", "bold cyan")
            what = Text.assemble(head, self._techniques.describe(one.config), (f"  {one.reason}", "dim"))
            grid.add_row(one.slot or "running", what)
            if len(running) == 1 and (before := expected(one.prediction)):
                grid.add_row("", Text(before, style="dim"))
        if not running:
            grid.add_row("running", Text(WORK.get(self._purpose, "between probes"), style="dim"))
        if self._best is not None and self._best[1] != self._baseline:
            ratio = best_speed(self._best, self._baseline)
            over = f", {times(ratio)}" if ratio else ""
            over += (
                f", {format_chance(self._chance)} likely better than the baseline" if self._chance is not None else ""
            )
            figures = summary(self._best[1], feasible=True)
            grid.add_row(
                "best", Text.assemble((f"{figures}{over}  ", "bold green"), self._techniques.describe(self._best[0]))
            )
        if self._baseline is not None:
            grid.add_row("baseline", Text(summary(self._baseline, feasible=True)))
        return grid

    def _front(self) -> list[tuple[Config, Outcome]]:
        known = [
            (m, config, outcome) for config, outcome in self._feasible.copy().items() if (m := outcome.measurement)
        ]
        front = front_by(known, lambda one: one[0])
        return [(config, outcome) for _, config, outcome in front]

    def _front_table(self, front: list[tuple[Config, Outcome]]) -> Table:
        table = _table("front")
        best = self._best[0] if self._best else None
        for config, outcome in front:
            _add(table, "", outcome, Text(self._techniques.describe(config)), good=config == best)
        return table

    def _last_table(self, last: list[ProbeEnded]) -> Table:
        table = _table("last")
        for event in last:
            trial, outcome = event.trial, event.trial.outcome
            cause = outcome.cause if outcome.measurement is None else "" if trial.feasible else "not feasible"
            before = (f"  {expected(trial.prediction)}", "dim")
            what = Text.assemble(self._techniques.describe(trial.config), (f"  {cause}", "red"), before)
            _add(table, f"#{trial.number}", outcome, what, good=is_best(event))
        return table

    def _clock(self) -> RenderableType:
        elapsed_s = time.monotonic() - self._began
        done = f"{plural(self._outcomes.total(), 'probe')}" + (f": {counts(self._outcomes)}" if self._outcomes else "")
        if self._budget_s is None:
            return Text(f"{format_seconds(max(1.0, elapsed_s))}  {done}", style="dim")
        left_s = max(0.0, self._budget_s - elapsed_s)
        left = f"at most {format_seconds(round(left_s))} left" if left_s >= 1 else "ending"
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._budget_s, completed=min(elapsed_s, self._budget_s), width=20)
        grid.add_row(bar, Text(left), Text(done, style="dim", overflow="ellipsis", no_wrap=True))
        return grid


def _table(title: str) -> Table:
    """A table of one line a row and fixed columns, so that the view does not jump."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=True)
    table.add_column(title, style="dim", width=8)
    table.add_column("samples/s", justify="right", width=14, no_wrap=True)
    table.add_column("peak", justify="right", width=8, no_wrap=True)
    table.add_column("config", ratio=1, no_wrap=True, overflow="ellipsis")
    return table


def _add(table: Table, name: str, outcome: Outcome, what: Text, *, good: bool) -> None:
    found = outcome.measurement
    if found is None:
        table.add_row(name, Text(str(outcome.kind), style="red"), "", what)
    else:
        speed = Text(measured_rate(found), style="green" if good else "")
        table.add_row(name, speed, format_bytes(found.peak_bytes), what)


def introduction(event: SearchStarted) -> list[str]:
    """The task, the limits and the file of the study; then the space: `batch_size (7), amp (2): 14 configs`."""
    free = [f"{name} ({len(choices)})" for name, choices in event.space.items() if len(choices) > 1]
    known = f", {plural(len(event.known), 'probe')} known" if event.known else ""
    return [
        f"{event.task} on {event.device}: {event.objective} within {format_bytes(event.memory_limit_bytes)} "
        f"({event.headroom:.0%} of it kept free), budget {format_seconds(event.budget_s)}; "
        f"study {shown_of(event.storage)}{known}",
        f"searching {', '.join(free) or 'nothing but the baseline'}: {plural(event.num_configs, 'config')}",
    ]


def summary(outcome: Outcome, *, feasible: bool) -> str:
    """`84.1 samples/s ±1.2%, 612 MiB`, or how the probe failed and why, on one line."""
    found = outcome.measurement
    if found is None:
        return " ".join(f"{outcome.kind}: {outcome.cause}".split()) if outcome.cause else str(outcome.kind)
    speed, _, noise = measured_rate(found).partition(" ")
    joules = f", {rate(found.joules_per_sample)} J a sample" if found.joules_per_sample else ""
    grows = f" growing to {format_bytes(found.long_run_peak_bytes)}" if found.long_run_growth_bytes else ""
    return f"{speed} samples/s {noise}, {format_bytes(found.peak_bytes)}{grows}{joules}{'' if feasible else ', not feasible'}"


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
    """Throughput of the best so far over the baseline's, each from a single process; None where one of them was disturbed."""
    if best is None or baseline is None or best[1].measurement is None or baseline.measurement is None:
        return None
    if best[1].disturbances or baseline.disturbances:
        return None
    return best[1].measurement.samples_per_s / baseline.measurement.samples_per_s
