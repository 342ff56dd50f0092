"""A study as sections: its probes, its front, its answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from autotune.records.config import BATCH_KEYS, describe_batch
from autotune.records.outcome import Kind
from autotune.records.study import BASELINE, PLAY_OFF, Trial
from autotune.report.answer import answer_sections, front_section
from autotune.report.figures import counts, limit_words, measured_rate, rate
from autotune.report.sections import Cell, Paragraph, Section, Span, Tone, by_reason, table
from autotune.study.reading import Study
from autotune.units import format_bytes, format_seconds, plural

MACHINE = ("device", "num_threads", "driver", "torch", "autotune", "total_bytes", "memory_limit_bytes", "global_batch")
DISTURBED_MARK = "*"  # beside the number of a probe that other work disturbed


def study_sections(study: Study, *, model: str = "model.py") -> Iterator[Section]:
    """Every probe, why the failed ones failed, the front, and the answer if there is one.

    Args:
        model: the model file, for the lines that show how to run the answer.
    """
    yield _headline(study)
    if study.probes:
        yield _probes(study)
        yield from _failures(study)
    if unsupported := study.facts.unsupported:
        yield Section("Not searched", tuple(by_reason(unsupported)), "does not apply here, or only if included")
    if study.result is not None and len(study.probes) <= study.result.cost.probes:
        front, baseline = study.result.front, study.result.baseline  # by the same estimate as the answer below
    else:
        front, measured = study.front_configs(), study.measured_configs()
        baseline = next((found for found in measured if found.config == study.baseline_config), None)
    if front:
        yield front_section(front, study.result, baseline, study.techniques)
    yield from conclusion(study, model=model)


def machine_facts(study: Study) -> dict[str, str]:
    """The machine, the versions and the limits of a study, in words, as far as it recorded them."""
    found = vars(study.facts.fingerprint)
    return {
        name.removeprefix("num_").removesuffix("_bytes").replace("_", " "): (
            format_bytes(found[name]) if name.endswith("_bytes") else str(found[name])
        )
        for name in MACHINE
        if found[name]
    }


def conclusion(study: Study, *, model: str = "model.py") -> Iterator[Section]:
    """The answer of a study, or why there is none."""
    if study.result is None:
        yield _no_answer(study)
        return
    yield from answer_sections(study.result, study.techniques, model=model, in_study=True)
    num_newer = len(study.probes) - study.result.cost.probes
    if num_newer > 0:
        newer = f"A search has continued since: {plural(num_newer, 'probe')} came after this answer."
        yield Section("", (Paragraph(Span(newer, Tone.WARNING)),))


def _no_answer(study: Study) -> Section:
    if not study.probes:
        return Section("No answer yet", (Paragraph("No probe has ended yet, so there is nothing to show."),))
    if why := study.facts.no_answer:
        return Section("No answer", (Paragraph(why),))
    if not any(probe.feasible for probe in study.probes):
        return Section("No answer", (Paragraph("Nothing was feasible so far; the failures are above."),))
    how = "No search of this study has ended. The same `autotune search` command continues where it stopped."
    return Section("No answer yet", (Paragraph(how),))


def _headline(study: Study) -> Section:
    device = study.facts.fingerprint.device
    about = f"task {study.facts.task or study.name}" + (f" on {device}" if device else "")
    limit = limit_words(study.facts.objective, study.memory_limit_bytes, study.headroom)
    kinds = Counter(str(probe.outcome.kind) for probe in study.probes)
    wall_s = sum(probe.wall_s for probe in study.probes)
    probed = f"{plural(len(study.probes), 'probe')} ({counts(kinds)}), {format_seconds(wall_s)} of probing"
    facts = [probed if study.probes else "no probes"]
    facts += [f"{study.num_running} running or left running"] if study.num_running else []
    facts += [f"{study.num_lost} cut short without an outcome"] if study.num_lost else []
    beside = [f"with other memory limits, by --study NAME: {', '.join(study.others)}"] if study.others else []
    told = ("; ".join(facts), *beside)
    return Section(study.name, (Paragraph(limit), *(Paragraph(Span(text, Tone.NOTE)) for text in told)), about)


def _probes(study: Study) -> Section:
    baseline = study.baseline_config
    speeds = (p.outcome.measurement.samples_per_s for p in study.probes if p.feasible and p.outcome.measurement)
    fastest = max(speeds, default=0.0)
    rows = (_probe(probe, study, fastest) for probe in study.probes)
    shown = table((">#", "batch", ">samples/s", ">expected", ">peak", "changes; why"), rows)
    note = f"changes are from the baseline, {study.techniques.describe(baseline)}" if baseline else ""
    marked = Paragraph(Span(f"{DISTURBED_MARK} other work disturbed it", Tone.NOTE))
    return Section("Probes", (shown, *([marked] if any(probe.disturbed for probe in study.probes) else [])), note)


def _probe(probe: Trial, study: Study, fastest: float) -> tuple[Cell, ...]:
    found, expected = probe.outcome.measurement, probe.prediction and probe.prediction.samples_per_s
    is_best = found is not None and probe.feasible and found.samples_per_s == fastest
    return (
        f"{probe.number}{DISTURBED_MARK if probe.disturbed else ' '}",
        describe_batch(probe.config).removeprefix("batch "),
        Span(measured_rate(found), Tone.BEST if is_best else Tone.PLAIN)
        if found
        else Span(str(probe.outcome.kind), Tone.BAD),
        Span(rate(expected) if expected else "", Tone.NOTE),
        Span(format_bytes(found.peak_bytes) if found else "", Tone.PLAIN if probe.feasible else Tone.BAD),
        _what_and_why(probe, study),
    )


def _what_and_why(probe: Trial, study: Study) -> Cell:
    baseline = study.baseline_config
    same_batch = {name: probe.config[name] for name in BATCH_KEYS}
    changes = study.techniques.describe(probe.config, {**baseline, **same_batch} if baseline else None)
    over = probe.outcome.measurement is not None and not probe.feasible
    stage = f"{probe.stage}, " if probe.stage in (BASELINE, PLAY_OFF) else ""
    return (
        "" if changes == "as the baseline" else f"{changes}  ",
        Span("over the limit  " if over else "", Tone.WARNING),
        Span(f"{stage}{probe.reason}", Tone.NOTE),
    )


def _failures(study: Study) -> Iterator[Section]:
    """Each cause once, with the probes that it ended. Causes that differ only in their figures count as one."""
    alike: dict[tuple[Kind, str], list[Trial]] = {}
    for probe in study.probes:
        if not probe.outcome.ok:
            alike.setdefault((probe.outcome.kind, re.sub(r"\d+", "", probe.outcome.cause)), []).append(probe)
    rows = []
    for (kind, _), probes in alike.items():
        numbers = " ".join(f"#{probe.number}" for probe in probes)
        cause = probes[0].outcome.cause or "no cause known"
        rows.append((Span(str(kind), Tone.BAD), (cause, Span(f"  {numbers}", Tone.NOTE))))
    if rows:
        yield Section("Failures", (table(("", ""), rows),), "recorded, and kept out of the answer")
