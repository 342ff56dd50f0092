"""The answers of several studies side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.records.result import Result
from autotune.report.figures import measured_rate, rate, spread, times
from autotune.report.gain import gain_in_table, said_of
from autotune.report.run_it import as_code
from autotune.report.sections import Cell, Section, Span, Tone, table
from autotune.report.study import machine_facts
from autotune.study.reading import Study
from autotune.units import format_bytes


def comparison_sections(studies: Sequence[Study]) -> Iterator[Section]:
    """A row for each study, what differs between the machines, and the configs.

    Raises:
        StudyError: a study has no answer.
    """
    named = {_name(place, studies): (study, study.answer()) for place, study in enumerate(studies)}
    rows = ((name, *_figures(answer)) for name, (_, answer) in named.items())
    titles = ("study", "verdict", ">gain", ">samples/s", ">baseline", ">peak")
    yield Section("Answers", (table(titles, rows),), "gains over each study's own baseline, 95% intervals")
    machines = {name: {**machine_facts(study), "kept in": study.storage} for name, (study, _) in named.items()}
    facts = dict.fromkeys(fact for machine in machines.values() for fact in machine)
    told = {fact: [machine.get(fact, "-") for machine in machines.values()] for fact in facts}
    differing = [(fact, *values) for fact, values in told.items() if len(set(values)) > 1]
    if differing:
        yield Section("What differs between them", (table(("", *machines), differing),))
    yield Section(
        "Configs",
        tuple(as_code(answer.config, study.techniques, f"{name}: ") for name, (study, answer) in named.items()),
    )


def _name(place: int, studies: Sequence[Study]) -> str:
    """The study's name, with its place where several are called the same."""
    name = studies[place].name
    return name if sum(other.name == name for other in studies) == 1 else f"{name} {place + 1}"


def _figures(answer: Result) -> tuple[Cell, ...]:
    found, gain = said_of(answer), gain_in_table(answer.speedup, answer.speedup_ci)
    if answer.speedup is not None and answer.speedup_ci and gain == times(answer.speedup):
        gain = f"{gain} {spread(answer.speedup, *answer.speedup_ci)}".rstrip()
    base = answer.baseline
    verdict = Span(found.brief, Tone.BEST if answer.verdict == "faster" else Tone.PLAIN)
    played = (measured_rate(found) for found in answer.play_off.finalists if found.config == answer.config)
    speed = next(played, rate(answer.samples_per_s))
    return verdict, gain, speed, measured_rate(base) if base else "-", format_bytes(answer.peak_bytes)
