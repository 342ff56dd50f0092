"""Measurements as sections: one probe, a study with its front and its answer, the answers of several studies side by side."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autotune.records.config import BATCH_KEYS, Choice, describe_batch
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.result import Result
from autotune.records.study import BASELINE, PLAY_OFF, Trial
from autotune.report.answer import answer_sections, as_code, as_json, front_section
from autotune.report.figures import counts, gain_in_table, limit_words, measured_rate, rate, said_of
from autotune.report.sections import Cell, Code, Paragraph, Section, Span, Tone, by_reason, pairs, table
from autotune.study.reading import Study
from autotune.techniques import Techniques
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
        shown = tuple(by_reason(unsupported, len(unsupported)))
        yield Section("Not searched", shown, "does not apply here, or only if included")
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
    if why := study.facts.no_answer:
        told = f"The last search found none, and this answer is an earlier one's: {why}"
        yield Section("No newer answer", (Paragraph(Span(told, Tone.WARNING)),))
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
    beside = [f"studies with other memory limits (--study NAME): {', '.join(study.others)}"] if study.others else []
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
    """Each cause of a failure once, with the probes it ended. Causes that differ only in their numbers count as one."""
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


def comparison_sections(studies: Sequence[Study]) -> Iterator[Section]:
    """A row for each study, what differs between the machines, and the configs.

    Raises:
        StudyError: a study has no answer.
    """
    named = {_name_among(place, studies): (study, study.answer()) for place, study in enumerate(studies)}
    has_energy = any(answer.energy.joules_per_sample is not None for _, answer in named.values())
    rows = ((name, *_answer_figures(answer, has_energy=has_energy)) for name, (_, answer) in named.items())
    titles = ("study", "verdict", "gain", ">samples/s", ">baseline", ">peak", *([">J/sample"] if has_energy else []))
    yield Section("Answers", (table(titles, rows),), "gains over each study's own baseline, 95% intervals")
    machines = {
        name: {
            **machine_facts(study),
            "parameters": f"{signature.num_parameters:,}" if (signature := study.facts.signature) else "-",
            "objective": study.facts.objective,
            "headroom": f"{study.headroom:.0%}",
            "kept in": study.storage,
        }
        for name, (study, _) in named.items()
    }
    facts = dict.fromkeys(fact for machine in machines.values() for fact in machine)
    told = {fact: [machine.get(fact, "-") for machine in machines.values()] for fact in facts}
    differing = [(fact, *values) for fact, values in told.items() if len(set(values)) > 1]
    if differing:
        yield Section("What differs between them", (table(("", *machines), differing),))
    yield Section(
        "Configs",
        tuple(as_code(answer.config, study.techniques, f"{name}: ") for name, (study, answer) in named.items()),
    )


def _name_among(place: int, studies: Sequence[Study]) -> str:
    """The study's name, followed by its place where several have the same name."""
    name = studies[place].name
    return name if sum(other.name == name for other in studies) == 1 else f"{name} {place + 1}"


def _answer_figures(answer: Result, *, has_energy: bool) -> tuple[Cell, ...]:
    found, gain = said_of(answer), gain_in_table(answer, answer.energy, answer.goal.objective)
    base = answer.baseline
    verdict = Span(found.brief, Tone.BEST if answer.verdict in ("faster", "thriftier") else Tone.PLAIN)
    played = (measured_rate(found) for found in answer.play_off.finalists if found.config == answer.config)
    speed = next(played, rate(answer.samples_per_s))
    joules = answer.energy.joules_per_sample
    told = ["-" if joules is None else rate(joules)] if has_energy else []
    return verdict, gain, speed, measured_rate(base) if base else "-", format_bytes(answer.peak_bytes), *told


def outcome_sections(outcome: Outcome, config: Mapping[str, Choice], techniques: Techniques) -> Iterator[Section]:
    """The figures of a probe that ran; for one that did not, the cause and the log."""
    rows: dict[str, Cell] = {"config": as_json(config, techniques)}
    if outcome.measurement is None:
        rows["outcome"] = Span(f"{outcome.kind}: {outcome.cause} (during {outcome.stage})", Tone.BAD)
    else:
        rows |= {"outcome": Span("ok", Tone.GOOD), **_outcome_figures(outcome.measurement)}
    if outcome.log:
        rows["log"] = outcome.log
    yield Section("", (pairs(rows),))
    if outcome.measurement is None and outcome.detail and outcome.kind is not Kind.OOM:
        yield Section("In detail", tuple(Code(line) for line in outcome.detail.rstrip().splitlines()))


def _outcome_figures(found: Measurement) -> dict[str, Cell]:
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
        "loss of the last micro batch": f"{found.final_loss:.4g}",
    }
    if found.joules_per_sample is not None or found.no_energy:
        joules = found.joules_per_sample
        rows["energy"] = f"not known: {found.no_energy}" if joules is None else f"{rate(joules)} J a sample"
    if found.compile_cold_s or found.compile_trouble:
        cold = f"{format_seconds(found.compile_cold_s)} with an empty cache, {format_seconds(found.compile_s)} from the cache"
        rows["compiling"] = "; ".join(filter(None, (cold if found.compile_cold_s else "", found.compile_trouble)))
    if found.start_wait_s:
        rows["start of a pass"] = f"a wait of {format_seconds(found.start_wait_s)}, counted"
    if found.growth_bytes_per_step or found.kept:
        grown = f"memory grows by {format_bytes(found.growth_bytes_per_step)} per optimizer step" * (
            found.growth_bytes_per_step > 0
        )
        kept = f"each micro batch leaves {found.kept}" if found.kept else ""
        rows["leak" if kept else "growth"] = "; ".join(filter(None, (grown, kept)))
    if found.long_run_growth_bytes:
        rows["a long run"] = (
            f"expected to hold {format_bytes(found.long_run_peak_bytes)}, as libraries may cache something for each shape"
        )
    if found.unequal:
        rows["ranks"] = found.unequal
    if found.disturbances:
        rows["disturbed"] = "; ".join(found.disturbances)
    return rows


def _seconds(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())
