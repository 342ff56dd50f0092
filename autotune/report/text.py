"""An answer as text for people: what to run, what it gains, how sure that is, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.records.config import Choice
from autotune.records.result import Check, Dropped, Measured, Result
from autotune.report.figures import counts, interval, measured_rate, plural, times
from autotune.report.run_it import python_lines, verify_command
from autotune.report.words import as_python, describe, describe_choice
from autotune.units import format_bytes, format_seconds

MAX_CODE_WIDTH = 100  # columns; a wider terminal does not make a wider dict
FRONT_NOTE = "what nothing beats in both"
ROLE_STYLES = {"answer": "bold green", "baseline": "cyan", "dropped": "yellow"}


def render_result(result: Result, console: Console, *, model: str = "model.py") -> None:
    """Print an answer.

    Args:
        console: where to; its width is kept to, except in the command line that is there to be copied.
        model: the model file, as the user named it, for the lines that show how to run the answer; empty for a task
            built in Python.
    """
    console.print()
    limit = (
        f"{result.objective} within {format_bytes(result.memory_limit_bytes)}, {result.headroom:.0%} of it kept free"
    )
    console.print(Text.assemble((result.study, "bold"), f" on {result.device}: {limit}"))
    _verdict_and_figures(result, console)
    if result.front:
        heading(console, "Memory/throughput front", FRONT_NOTE)
        console.print(front_table(result.front, answer=result.config, baseline=result.baseline))
    _reasons_and_usage(result, console, model)


def render_answer(result: Result, console: Console, *, model: str) -> None:
    """Print what `render_result` does, for a reader who has just been shown the study and its front."""
    heading(console, "Answer")
    _verdict_and_figures(result, console)
    _reasons_and_usage(result, console, model)


def heading(console: Console, title: str, note: str = "") -> None:
    """Print a section's heading after an empty line."""
    console.print()
    console.print(Text.assemble((title, "bold"), (f"  {note}" if note else "", "dim")))


def paragraph(console: Console, text: str | Text) -> None:
    """Print text indented by two and wrapped, without trailing spaces."""
    for line in (Text(text) if isinstance(text, str) else text).wrap(console, console.width - 2):
        line.rstrip()
        console.print(Text("  ").append_text(line))


def table(*columns: tuple[str, str], last: str) -> Table:
    """A plain table, indented by two: (heading, alignment) columns that do not wrap, and a last one that does."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=False)
    made.add_column("", width=0)
    for title, justify in columns:
        made.add_column(title, justify="right" if justify == "right" else "left", no_wrap=True)
    made.add_column(last, overflow="fold")
    return made


def front_table(front: Iterable[Measured], *, answer: dict[str, Choice] | None, baseline: Measured | None) -> Table:
    """The front by increasing memory, the answer and the baseline marked."""
    made = table(("peak", "right"), ("samples/s", "right"), ("speed", "right"), last="config")
    for measured in front:
        role = (
            "  answer"
            if measured.config == answer
            else "  baseline"
            if baseline and measured.config == baseline.config
            else ""
        )
        speed = measured.samples_per_s / baseline.samples_per_s if baseline else None
        made.add_row(
            "",
            format_bytes(measured.peak_bytes),
            measured_rate(measured),
            times(speed),
            Text.assemble(describe(measured.config), (role, "bold green" if role == "  answer" else "cyan")),
        )
    return made


def _verdict_and_figures(result: Result, console: Console) -> None:
    verdict, style = _verdict(result)
    console.print()
    paragraph(console, Text(verdict, style=f"bold {style}".strip()))
    if not result.confirmed:
        paragraph(
            console,
            Text(
                "Not confirmed: the search ended before a round of the play-off did, so each figure is of one process.",
                style="yellow",
            ),
        )
    heading(console, "Recommended config", "whatever is not named is off")
    width = min(console.width, MAX_CODE_WIDTH) - 2
    paragraph(console, Text(as_python(result.config, prefix="config = ", width=width), style="bold"))
    _comparison(result, console)


def _verdict(result: Result) -> tuple[str, str]:
    if result.baseline is None or result.speedup is None:
        return (
            "This config runs; the baseline did not, so there is no speed-up to state. The warnings say why.",
            "green",
        )
    if result.config == result.baseline.config:
        return "Keep what you have: nothing beat the baseline beyond the noise.", ""
    sure = ""
    if result.speedup_ci:
        low, high = result.speedup_ci
        known = low > 0 and high != float("inf")
        sure = f" (95% interval {interval(low, high)})" if known else " (from one round, so its interval is unknown)"
    memory = f"{times(result.peak_bytes / result.baseline.peak_bytes)} its memory"
    speed = f"{times(result.speedup)} the baseline's throughput{sure}, with {memory}."
    if result.verdict == "faster":
        return f"Faster: {speed}", "green"
    if result.verdict == "slower":
        return f"Slower: {speed}", "yellow"
    return f"As fast as the baseline within the noise: {speed}", ""


def _comparison(result: Result, console: Console) -> None:
    """The answer beside the baseline and the other finalists, those included that the play-off dropped."""
    others = [
        m
        for m in result.finalists
        if m.config != result.config and not (result.baseline and m.config == result.baseline.config)
    ]
    failed = [other for other in others if isinstance(other, Dropped)]
    ran = [other for other in others if not isinstance(other, Dropped)]
    rows = [
        ("answer", _answer(result)),
        *((f"{place}.", other) for place, other in enumerate(_by_speed(ran), start=2)),
        *(("dropped", other) for other in failed),
    ]
    if result.baseline and result.baseline.config != result.config:
        rows.append(("baseline", result.baseline))
    note = "fresh processes in turn; 95% intervals" if result.confirmed else "95% intervals"
    heading(console, "Play-off" if result.confirmed else "Measured", note)
    made = table(
        ("", "left"), ("samples/s", "right"), ("step", "right"), ("peak", "right"), ("runs", "right"), last="config"
    )
    for role, measured in rows:
        made.add_row(
            "",
            Text(role, style=ROLE_STYLES.get(role, "dim")),
            *(_figures(measured) if measured.num_processes else ("-", "-", "-")),
            str(measured.num_processes),
            Text.assemble(
                describe(measured.config), (f"  {measured.dropped}" if isinstance(measured, Dropped) else "", "yellow")
            ),
        )
    console.print(made)
    usable = result.memory_limit_bytes * (1 - result.headroom)
    share = result.peak_bytes / result.memory_limit_bytes if result.memory_limit_bytes else 0.0
    paragraph(
        console,
        Text(f"The answer's peak is {share:.0%} of the limit; up to {format_bytes(usable)} was allowed.", style="dim"),
    )


def _figures(measured: Measured) -> tuple[str, str, str]:
    return measured_rate(measured), format_seconds(measured.step_s), format_bytes(measured.peak_bytes)


def _answer(result: Result) -> Measured:
    """The answer's own figures, with what only the play-off's or the front's record of it knows."""
    known = [measured for measured in (*result.finalists, *result.front) if measured.config == result.config]
    if result.baseline and result.baseline.config == result.config:
        known.insert(0, result.baseline)
    return Measured(
        config=result.config,
        samples_per_s=result.samples_per_s,
        samples_per_s_ci=result.samples_per_s_ci,
        peak_bytes=result.peak_bytes,
        step_s=known[0].step_s if known else _samples_per_step(result.config) / result.samples_per_s,
        num_processes=known[0].num_processes if known else 1,
    )


def _samples_per_step(config: dict[str, Choice]) -> int:
    return int(config["batch_size"]) * int(config["accumulation_steps"])


def _by_speed(measured: Sequence[Measured]) -> list[Measured]:
    return sorted(measured, key=lambda m: -m.samples_per_s)


def _reasons_and_usage(result: Result, console: Console, model: str) -> None:
    _reasons(result, console)
    _cost(result, console)
    _warnings(result, console)
    _usage(result, console, model)


def _reasons(result: Result, console: Console) -> None:
    """What each technique did, what limits the speed, and what the checks found."""
    if result.effects:
        heading(console, "What each change did", "from probes that differ in it alone")
        made = table(("speed", "right"), ("memory", "right"), ("pairs", "right"), last="change")
        for effect in result.effects:
            before, after = (
                describe_choice(effect.technique, choice) for choice in (effect.baseline_choice, effect.choice)
            )
            made.add_row(
                "",
                _ratio(effect.speed_ratio, more_is_better=True),
                _ratio(effect.memory_ratio, more_is_better=False),
                str(effect.num_pairs),
                Text.assemble(before, (" -> ", "dim"), after, ("" if effect.num_pairs else "  not isolated", "dim")),
            )
        console.print(made)
    if result.limit:
        heading(console, "What limits the speed now")
        paragraph(console, result.limit)
    if result.checks:
        heading(console, "Checked on your model", "one small step against plain fp32, relative errors")
        made = table(("gradient", "right"), ("cosine", "right"), ("loss", "right"), ("buffers", "right"), last="")
        for check in result.checks:
            errors = (
                f"{check.gradient_error:.1e}",
                f"{check.gradient_cosine:.6f}",
                f"{check.loss_error:.1e}",
                f"{check.buffer_error:.1e}",
            )
            made.add_row("", *errors, _check_verdict(check))
        console.print(made)


def _check_verdict(check: Check) -> Text:
    what = "whole config" if check.technique == "config" else describe_choice(check.technique, check.choice)
    bound = "exact" if check.exact else "reduced precision"
    names = "" if check.names_equal else ", parameter names changed"
    why = f": {check.reason}" if check.reason and not check.passed else ""
    passed = Text("passed", style="green") if check.passed else Text("FAILED", style="bold red")
    return Text.assemble(
        passed, f" as {bound}, {what}{names}{why}", (f"; noise {check.noise:.0e}" if check.noise else "", "dim")
    )


def _ratio(ratio: float | None, *, more_is_better: bool) -> Text:
    if ratio is None:
        return Text("-", style="dim")
    gain = ratio if more_is_better else 1 / ratio
    return Text(times(ratio), style="green" if gain >= 1.01 else "yellow" if gain <= 0.99 else "")


def _cost(result: Result, console: Console) -> None:
    heading(console, "The search")
    paragraph(
        console,
        f"{plural(result.probes, 'probe')} ({counts(result.outcomes)}) in the study, {format_seconds(result.train_s)} "
        f"of them in training steps; this search took {format_seconds(result.wall_s)}. "
        f"Kept in {result.storage.removeprefix('sqlite:///')}.",
    )


def _warnings(result: Result, console: Console) -> None:
    if not result.warnings:
        return
    heading(console, "Warnings")
    for warning in result.warnings:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(Text("  !", style="bold yellow"), Text(warning))
        console.print(grid)


def _usage(result: Result, console: Console, model: str) -> None:
    """How to run the answer. The command is one line however narrow the console is, so that it can be copied."""
    heading(console, "Run it")
    paragraph(console, python_lines(model, result.asked, width=console.width - 2))
    if command := verify_command(result.config, model, result.asked):
        console.print()
        console.print(Text(f"  {command}"), soft_wrap=True)
