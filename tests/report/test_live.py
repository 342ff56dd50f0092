"""What is seen while a search runs."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO, cast

import pytest

from autotune.records.outcome import Kind, Outcome, Progress
from autotune.records.study import Trial
from autotune.report.live import Dashboard, Lines, best_speed, live_listener
from autotune.techniques import find_techniques
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
from tests.report.sample_study import ANSWER, BASELINE, FAILURES, HEADROOM, LIMIT, PREDICTION, SPACE, config, measured

KNOWN = Trial(number=0, stage="baseline", config=BASELINE, outcome=measured(BASELINE), feasible=True)
STARTED = SearchStarted(
    task="gpt",
    device="cpu (AMD EPYC, 2 threads)",
    study="gpt",
    storage="sqlite:////data/studies/gpt.db",
    objective="throughput",
    memory_limit_bytes=LIMIT,
    headroom=HEADROOM,
    budget_s=120.0,
    space={name: tuple(choices) for name, choices in SPACE.items()},
    num_configs=84,
    known=(KNOWN,),
    best=(BASELINE, measured(BASELINE)),
    baseline=measured(BASELINE),
    techniques=find_techniques(),
)


def _events() -> Iterator[Event]:
    """A short search: the baseline, four failures, something better, a note, a warning."""
    yield STARTED
    yield Note(text="channels_last is not searched: the model has no 2-D convolution")
    base = measured(BASELINE)
    probes = [
        (BASELINE, base, "baseline"),
        *((c, o, "search") for c, o in FAILURES),
        (ANSWER, measured(ANSWER), "search"),
    ]
    best = (BASELINE, base)
    for number, (chosen, outcome, stage) in enumerate(probes):
        yield ProbeStarted(
            number=number,
            stage=stage,
            config=chosen,
            reason="likely faster: bf16",
            prediction=PREDICTION,
            elapsed_s=4.0 * number,
        )
        if chosen == ANSWER:
            best = (chosen, outcome)
        yield ProbeEnded(
            trial=Trial(
                number=number,
                stage=stage,
                config=chosen,
                outcome=outcome,
                prediction=PREDICTION if stage == "search" else None,
                feasible=outcome.ok,
            ),
            best=best,
            baseline=base,
            elapsed_s=4.0 * number + 3,
        )
    yield Note(text="optimizer_impl=foreach is left out: gradients differ by 2e-3", warning=True)


def _lines(*, quiet: bool = False) -> list[str]:
    stream = io.StringIO()
    with live_listener(stream, quiet=quiet) as view:
        for event in _events():
            view.on(event)
    return stream.getvalue().splitlines()


@contextmanager
def _terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """A real terminal, and a function that closes it and returns all that was written to it."""
    master, slave = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(master, 65536):
                written.append(chunk)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    stream = os.fdopen(slave, "w")

    def close() -> str:
        stream.close()
        reader.join()
        return b"".join(written).decode()

    yield stream, close
    if not stream.closed:
        close()
    os.close(master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with _terminal() as opened:
        yield opened


def test_without_a_terminal_there_is_one_line_a_probe() -> None:
    probes = [line for line in _lines() if line.startswith("[")]
    assert probes[0] == "[   3/120s] #0 baseline batch 16 x3: 43.5 samples/s ±1.4%, 1.33 GiB"
    expected = " [expected 72.1 (65.0 to 80.2) samples/s, 1.07 GiB, 45% to win]"
    failed = "[   7/120s] #1 search   batch 8 x6, bf16, 4 checkpoint segments, fused: timeout: no end within 20 s"
    assert probes[1] == failed + expected
    best = "[  23/120s] #5 search   batch 24 x2, bf16, fused: 75.5 samples/s ±1.3%, 1.08 GiB (best)"
    assert probes[5] == best + expected
    assert len(probes) == 6


def test_without_a_terminal_the_search_introduces_itself_and_notes_are_lines() -> None:
    lines = _lines()
    assert lines[0].startswith(
        "gpt on cpu (AMD EPYC, 2 threads): throughput within 1.46 GiB (5% of it kept free), budget 2m00s"
    )
    assert lines[0].endswith("study /data/studies/gpt.db, 1 probe known")
    assert lines[1] == "searching batch_size (7), amp (2), checkpoint_segments (3), optimizer_impl (2): 84 configs"
    assert "note: channels_last is not searched: the model has no 2-D convolution" in lines
    assert lines[-1].startswith("warning: optimizer_impl=foreach")


def test_without_a_terminal_there_are_no_escape_codes_whatever_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not any("\x1b" in line for line in _lines())


def test_quiet_leaves_only_warnings() -> None:
    assert _lines(quiet=True) == ["warning: optimizer_impl=foreach is left out: gradients differ by 2e-3"]


def test_a_cause_of_several_lines_takes_one() -> None:
    stream = io.StringIO()
    outcome = Outcome(kind=Kind.ERROR, cause="RuntimeError: first\n  second")
    Lines(stream).on(
        ProbeEnded(
            trial=Trial(number=7, stage="search", config=BASELINE, outcome=outcome, feasible=False),
            best=None,
            baseline=None,
            elapsed_s=1,
        )
    )
    assert stream.getvalue().count("\n") == 1 and "error: RuntimeError: first second" in stream.getvalue()


def test_a_probe_beyond_the_limit_is_marked() -> None:
    stream = io.StringIO()
    ended = ProbeEnded(
        trial=Trial(number=7, stage="search", config=BASELINE, outcome=measured(BASELINE), feasible=False),
        best=None,
        baseline=None,
        elapsed_s=1,
    )
    Lines(stream).on(ended)
    assert "1.33 GiB, not feasible" in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(
    terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream, close = terminal
    view = live_listener(stream, quiet=False)
    assert type(view) is Lines
    view.on(STARTED)
    assert "\x1b" not in close()


def _drawn(terminal: tuple[TextIO, Callable[[], str]]) -> str:
    stream, close = terminal
    view = live_listener(stream, quiet=False)
    assert isinstance(view, Dashboard)
    with view:
        for event in _events():
            view.on(event)
        view._live.refresh()
    return close()


def test_the_best_so_far_is_not_held_against_a_baseline_that_other_work_slowed() -> None:
    best, calm = (ANSWER, measured(ANSWER)), measured(BASELINE)
    assert calm.measurement is not None and best_speed(best, calm) == pytest.approx(1.73, abs=0.01)
    slowed = replace(calm.measurement, disturbances=("others held the processor for 50% of the time",))
    assert best_speed(best, replace(calm, measurement=slowed)) is None


def test_a_terminal_shows_best_baseline_front_last_probes_and_time_left(
    terminal: tuple[TextIO, Callable[[], str]],
) -> None:
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", _drawn(terminal))
    for fact in (
        "best      75.5 samples/s ±1.3%, 1.08 GiB, 1.73x  batch 24 x2, bf16, fused",
        "baseline  43.5 samples/s ±1.4%, 1.33 GiB",
        "front",
        "the loss is nan at step 3",
        "7 probes: 3 ok, 1 timeout, 1 crashed, 1 error, 1 nonfinite",
        "left",
        "warning: optimizer_impl=foreach",
    ):
        assert fact in drawn, fact


def test_a_terminal_shows_the_running_probe(terminal: tuple[TextIO, Callable[[], str]]) -> None:
    stream, close = terminal
    with live_listener(stream, quiet=False) as view:
        view.on(STARTED)
        view.on(
            ProbeStarted(number=7, stage="play-off", config=ANSWER, reason="round 2", prediction=None, elapsed_s=30.0)
        )
        cast(Dashboard, view)._live.refresh()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", close())
    assert "#7 play-off, 1 s  batch 24 x2, bf16, fused  round 2" in drawn


def test_a_resumed_search_shows_what_is_known_before_its_first_probe_has_ended(
    terminal: tuple[TextIO, Callable[[], str]],
) -> None:
    stream, close = terminal
    with live_listener(stream, quiet=False) as view:
        view.on(STARTED)
        cast(Dashboard, view)._live.refresh()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", close())
    for fact in ("searching batch_size (7), amp (2)", "baseline  43.5 samples/s", "1 probe: 1 ok"):
        assert fact in drawn, fact
    assert "best  " not in drawn  # the baseline is the best so far
    assert "0 probes" not in drawn[drawn.rindex("baseline  ") :]


@pytest.mark.parametrize("columns", [60, 140])
def test_a_terminal_that_is_resized_is_drawn_anew(columns: int, terminal: tuple[TextIO, Callable[[], str]]) -> None:
    stream, close = terminal
    with live_listener(stream, quiet=False) as view:
        for event in _events():
            view.on(event)
        cast(Dashboard, view)._console.width = columns
        cast(Dashboard, view)._live.refresh()
        cast(Dashboard, view)._live.refresh()
    before, after = close().split("\x1b[2J\x1b[H")  # once
    rest = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", after)
    assert rest.count("searching batch_size (7)") == rest.count("warning: optimizer_impl=foreach") == 1
    assert "searching batch_size (7)" in before


def test_a_terminal_shows_how_far_the_running_probe_has_come(terminal: tuple[TextIO, Callable[[], str]]) -> None:
    stream, close = terminal
    with live_listener(stream, quiet=False) as view:
        view.on(STARTED)
        view.on(ProbeStarted(number=7, stage="search", config=ANSWER, reason="bf16", prediction=None, elapsed_s=30.0))
        progress = Progress(stage="warmup", num_micro_steps=12, peak_bytes=2**29, train_s=0.5)
        view.on(ProbeAdvanced(number=7, progress=progress))
        cast(Dashboard, view)._live.refresh()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", close())
    assert "#7 search, 1 s, warming up: 12 micro steps, 512 MiB" in drawn


def test_what_is_done_between_probes_is_shown(terminal: tuple[TextIO, Callable[[], str]]) -> None:
    stream, close = terminal
    with live_listener(stream, quiet=False) as view:
        for event in (Working(purpose="inspection"), STARTED, Working(purpose="tracing")):
            view.on(event)
            cast(Dashboard, view)._live.refresh()
    drawn = close()
    first, *others = (
        drawn.index(words) for words in ("importing torch", "inspecting the model", "tracing training steps")
    )
    assert first < others[0] < others[1]


def test_no_color_draws_without_colour(
    terminal: tuple[TextIO, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m", _drawn(terminal)) is None


def test_an_interrupt_passes_through_and_leaves_the_terminal_clean(terminal: tuple[TextIO, Callable[[], str]]) -> None:
    stream, close = terminal
    view = live_listener(stream, quiet=False)

    def interrupted() -> None:
        with view:
            view.on(STARTED)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    drawn = close()
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor is back
    assert drawn.endswith("\x1b[2K")  # and the table is gone


@pytest.mark.parametrize("event", [None, "nonsense", 3, object()])
def test_an_odd_event_ends_neither_view_nor_search(event: Any, terminal: tuple[TextIO, Callable[[], str]]) -> None:
    for view in (live_listener(io.StringIO(), quiet=False), live_listener(terminal[0], quiet=False)):
        with view:
            view.on(event)
            view.on(STARTED)


def test_a_measurement_of_nothing_is_drawn(terminal: tuple[TextIO, Callable[[], str]]) -> None:
    odd = ProbeEnded(
        trial=Trial(number=1, stage="search", config=config(2), outcome=Outcome(kind=Kind.OK), feasible=True),
        best=(config(2), Outcome(kind=Kind.OK)),
        baseline=Outcome(kind=Kind.OOM),
        elapsed_s=1e9,
    )
    with live_listener(terminal[0], quiet=False) as view:
        view.on(odd)
        cast(Dashboard, view)._live.refresh()
    assert "#1 " in terminal[1]()


@pytest.mark.parametrize("quiet", [True, False])
def test_a_closed_stream_does_not_reach_the_search(quiet: bool) -> None:
    stream = io.StringIO()
    view: Listener = live_listener(stream, quiet=quiet)
    stream.close()
    with view:
        for event in _events():
            view.on(event)


def test_the_table_shows_the_probe_of_every_slot() -> None:
    view = Dashboard(io.StringIO())
    view.on(STARTED)
    for number in range(2):
        started = ProbeStarted(
            number=number,
            stage="search",
            config=ANSWER,
            reason="likely faster",
            prediction=None,
            elapsed_s=1.0,
            slot=f"cuda:{number}",
        )
        view.on(started)
    assert [one.number for one in view._running.values()] == [0, 1]
    assert view._state().row_count == 3  # and the baseline
    view.on(ProbeEnded(trial=replace(KNOWN, number=0), best=None, baseline=None, elapsed_s=2.0))
    assert [*view._running] == ["cuda:1"]
