"""A study as text for people: its probes, its front, its answer."""

from __future__ import annotations

import re
from collections import Counter

from rich.console import Console
from rich.text import Text

from autotune.records.outcome import Kind
from autotune.records.result import Measured
from autotune.report.figures import counts, expected, measured_rate, plural
from autotune.report.text import FRONT_NOTE, front_table, heading, paragraph, render_answer, table
from autotune.report.words import describe, describe_batch
from autotune.study.reading import ProbeRecord, Study
from autotune.units import format_bytes, format_seconds


def render_study(study: Study, console: Console, *, model: str = "model.py") -> None:
    """Print a study: every probe, why the failed ones failed, the front, and the answer if there is one.

    Args:
        model: the model file, for the lines that show how to run the answer.
    """
    _headline(study, console)
    if study.probes:
        _probes(study, console)
        _failures(study, console)
        _left_out(study, console)
        _front(study, console)
    if study.result is not None:
        render_answer(study.result, console, model=model)
        num_newer = len(study.probes) - study.result.probes
        if num_newer > 0:
            console.print()
            paragraph(
                console, Text(f"A search went on since: {plural(num_newer, 'probe')} came after this answer.", "yellow")
            )
    elif not study.probes:
        paragraph(console, "No probe has ended yet, so there is nothing to show.")
    elif not any(probe.feasible for probe in study.probes):
        heading(console, "No answer")
        paragraph(
            console, "Nothing feasible so far: no config ran through within the memory limit. See the failures above."
        )
    else:
        heading(console, "No answer yet")
        paragraph(
            console, "No search of this study has ended. The same `autotune search` command goes on where it stopped."
        )


def _headline(study: Study, console: Console) -> None:
    device = study.attributes.get("fingerprint", {}).get("device", "")
    about = f"task {study.attributes.get('task', study.name)}" + (f" on {device}" if device else "")
    console.print(Text.assemble((study.name, "bold"), f"  {about}"))
    kinds = Counter(str(probe.outcome.kind) for probe in study.probes)
    wall_s = sum(probe.wall_s for probe in study.probes)
    facts = f"{plural(len(study.probes), 'probe')} ({counts(kinds)}), {format_seconds(wall_s)} of probing"
    if not study.probes:
        facts = "no probes"
    extra = [f"{study.num_running} running or left running"] if study.num_running else []
    extra += [f"{study.num_lost} cut short without an outcome"] if study.num_lost else []
    limit = f"{study.attributes.get('objective', 'throughput')} within {format_bytes(study.memory_limit_bytes)}"
    paragraph(console, f"{limit}, {study.headroom:.0%} of it kept free")
    paragraph(console, Text("; ".join([facts, *extra]), style="dim"))


def _probes(study: Study, console: Console) -> None:
    baseline = study.baseline_config
    heading(console, "Probes", f"the baseline is {describe(baseline)}; changes are from it" if baseline else "")
    made = table(
        ("#", "right"),
        ("stage", "left"),
        ("batch", "left"),
        ("samples/s", "right"),
        ("peak", "right"),
        last="changes; why",
    )
    fastest = max(
        (p.outcome.measurement.samples_per_s for p in study.probes if p.feasible and p.outcome.measurement), default=0.0
    )
    for probe in study.probes:
        measurement = probe.outcome.measurement
        speed = Text(measured_rate(measurement)) if measurement else Text(str(probe.outcome.kind), style="red")
        peak = Text(format_bytes(measurement.peak_bytes) if measurement else "")
        if measurement and not probe.feasible:
            peak.stylize("red")
        if measurement and probe.feasible and measurement.samples_per_s == fastest:
            speed.stylize("bold green")
        made.add_row(
            "",
            str(probe.number),
            probe.stage,
            describe_batch(probe.config).removeprefix("batch "),
            speed,
            peak,
            _what_and_why(probe, baseline),
        )
    console.print(made)


def _what_and_why(probe: ProbeRecord, baseline: dict[str, int | str | bool]) -> Text:
    same_batch = {name: probe.config[name] for name in ("batch_size", "accumulation_steps")}
    changes = describe(probe.config, {**baseline, **same_batch} if baseline else None)
    if changes == "as the baseline":
        changes = "-"
    flags = [", over the limit"] if probe.outcome.measurement and not probe.feasible else []
    flags += [", disturbed"] if probe.disturbed else []
    changes = changes.replace("checkpoint segment", "segment")  # a row a probe, where the console is 80 wide
    why = "; ".join(filter(None, (probe.reason.removeprefix("proposed "), expected(probe.forecast))))
    return Text.assemble(changes, ("".join(flags), "yellow"), (f"  {why}", "dim"))


def _failures(study: Study, console: Console) -> None:
    """Each cause once, with the probes that it ended; causes that differ in figures alone are one."""
    alike: dict[tuple[Kind, str], list[ProbeRecord]] = {}
    for probe in study.probes:
        if not probe.outcome.ok:
            alike.setdefault((probe.outcome.kind, re.sub(r"\d+", "", probe.outcome.cause)), []).append(probe)
    if not alike:
        return
    heading(console, "Failures", "recorded, and kept out of the answer")
    made = table(("", "left"), last="")
    made.show_header = False
    for (kind, _), probes in alike.items():
        cause = probes[0].outcome.cause or "no cause known"
        numbers = " ".join(f"#{probe.number}" for probe in probes)
        made.add_row("", Text(str(kind), style="red"), Text.assemble(cause, (f"  {numbers}", "dim")))
    console.print(made)


def _left_out(study: Study, console: Console) -> None:
    unsupported: dict[str, str] = study.attributes.get("unsupported", {})
    if unsupported:
        heading(console, "Not searched", "does not apply here")
        made = table(("", "left"), last="")
        made.show_header = False
        for name, reason in unsupported.items():
            made.add_row("", name, Text(reason))
        console.print(made)


def _front(study: Study, console: Console) -> None:
    front = study.front_configs()
    if not front:
        return
    heading(console, "Memory/throughput front", FRONT_NOTE)
    answer = study.result.config if study.result else None
    console.print(front_table(front, answer=answer, baseline=_baseline(study)))


def _baseline(study: Study) -> Measured | None:
    """The baseline's figures as the front counts them."""
    return next((found for found in study.measured_configs() if found.config == study.baseline_config), None)
