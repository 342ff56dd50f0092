"""`autotune doctor`: proves on this machine, in about a minute, what a search assumes, each check in a process of its own.

A check collects plain facts; a judge (`verdicts`) says what they mean for a search.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autotune.devices import name_devices, open_device, require_linux
from autotune.devices.selftest import Facts
from autotune.doctor import checks, verdicts
from autotune.doctor.checks import TASKS, run_trainings
from autotune.doctor.verdicts import Judge, State
from autotune.records.options import ONE_DEVICE
from autotune.report.sections import Paragraph, Section, Span, Tone, table
from autotune.units import format_bytes
from autotune.version import __version__

DEVICE_CHECKS: dict[str, dict[str, Judge]] = {
    "driver": {"NVML": verdicts.judge_driver},
    "memory_limit": {"memory limit": verdicts.judge_limit, "out of memory": verdicts.judge_recognition},
    "other_error": {"other errors": verdicts.judge_other_error},
    "books": {"peak memory": verdicts.judge_peak, "driver's books": verdicts.judge_books},
    "clock": {"clock": verdicts.judge_clock},
    "page_locked": {"page-locked memory": verdicts.judge_page_locked},
    "workers": {"data workers": verdicts.judge_workers},
}
GPU_ONLY = {
    "clock": "a CPU has no clock of its own to compare with",
    "page_locked": "there is no copy to a GPU",
}
TOGETHER_CHECKS: dict[str, Judge] = {
    "devices together": verdicts.judge_group,
    "all-reduce": verdicts.judge_collective("all-reduce", 2.0),
    "all-gather": verdicts.judge_collective("all-gather", 1.0),
    "reduce-scatter": verdicts.judge_collective("reduce-scatter", 1.0),
    "communicator": verdicts.judge_communicator,
}
TRAINING_CHECKS: dict[str, Judge] = {
    "fork server": verdicts.judge_fork,
    "equal probes": verdicts.judge_equal,
    "quiet machine": verdicts.judge_quiet,
    "calibration": verdicts.judge_calibration,
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One assumption: whether it holds here, what was found, and what that means for a search (empty if it holds)."""

    name: str
    state: State
    found: str
    meaning: str = ""
    facts: Facts = field(default_factory=dict)


def examine(
    device: str = "auto", tell: Callable[[str], None] = lambda name: None, devices: str = ONE_DEVICE
) -> Iterator[Line]:
    """Every check, one after the other: on one device, and how several work together.

    Args:
        device, devices: as of a search; of several the first is the one device.
        tell: is called with the name of each check before it begins.

    Raises:
        DeviceError: there is no such device, or this is not Linux.
    """
    require_linux()
    names = name_devices(devices, device)
    opened = open_device(names[0])
    name, info, can = opened.name, opened.info(), opened.capabilities
    possible = {"clock": can.streams, "page_locked": can.page_locked}
    yield Line(
        name="device",
        state=State.DIFFERS if any("is not used" in note for note in info.notes) else State.OK,
        found=f"{info.name}: {info.model}, {format_bytes(info.free_bytes)} of {format_bytes(info.total_bytes)} free",
        meaning="; ".join(info.notes),
        facts={**asdict(info), "python": platform.python_version(), "autotune": __version__},
    )
    with run_trainings(name) as trained:
        for test, judges in DEVICE_CHECKS.items():
            tell(", ".join(judges))
            if not possible.get(test, True):
                yield from (Line(name=line, state=State.UNAVAILABLE, found=GPU_ONLY[test]) for line in judges)
                continue
            facts = checks.in_process(test, name)
            yield from (_line(line, facts, judge) for line, judge in judges.items())
        tell("memory after a kill")
        yield _line("memory after a kill", checks.kill_and_watch(name), verdicts.judge_release)
        tell(f"training of {', '.join(task.name for task in TASKS)}")
        for task, facts in trained:
            judges = TRAINING_CHECKS if task is TASKS[0] else {}
            yield from (_line(line, facts, judge) for line, judge in judges.items())
            yield _line(f"predicted memory: {task.name}", facts, verdicts.judge_prediction)
    if len(names) > 1:
        yield from _together(names, tell)
    yield _line("compiler", {"missing": opened.why_not_compiled()}, verdicts.judge_compiler)
    yield _line("study", checks.write_database(), verdicts.judge_study)
    machine = {"device_kind": opened.kind, "processor": platform.machine().lower()}
    yield _line("tested before", machine, verdicts.judge_tested)


def _together(names: Sequence[str], tell: Callable[[str], None]) -> Iterator[Line]:
    """How several devices work together: nothing is run where two of them are one card."""
    connected = checks.connections(names)
    yield _line("cards", connected, verdicts.judge_cards)
    yield _line("connection", connected, verdicts.judge_paths)
    if connected["same"]:
        return
    tell(f"{len(names)} devices together")
    facts = checks.run_together(names)
    if "failure" in facts:
        yield _line("devices together", facts, verdicts.judge_group)
        return
    facts["kept"] = checks.keep_communicator(facts)
    yield from (_line(name, facts, judge) for name, judge in TOGETHER_CHECKS.items())


def sections(lines: Iterable[Line]) -> Iterator[Section]:
    """The lines as a table, and a sentence on the whole."""
    lines = list(lines)
    tones = {State.OK: Tone.GOOD, State.DIFFERS: Tone.FAILED, State.UNAVAILABLE: Tone.NOTE}
    rows = (
        (line.name, Span(line.state, tones[line.state]), f"{line.found}{': ' if line.meaning else ''}{line.meaning}")
        for line in lines
    )
    yield Section("", (table(("assumption", "", "what was found, and what it means for a search"), rows),))
    broken = [line.name for line in lines if line.state is State.DIFFERS]
    said = (
        f"does not hold here: {', '.join(broken)}"
        if broken
        else "everything that a search assumes, and that applies, holds here"
    )
    yield Section("", (Paragraph(said),))


def plain(lines: Iterable[Line]) -> dict[str, Any]:
    """The lines with all their facts, fit to be attached to an issue: no process ids, paths or command lines."""
    return {"lines": [_anonymous(asdict(line)) for line in lines]}


def _anonymous(value: Any) -> Any:
    if isinstance(value, str):
        value = re.sub(r"""(["'])~?/.*?\1""", "<path>", value)  # it may hold spaces
        value = re.sub(r"(?<![\w.:/])(?:file://)?~?/[\w.+@%~-]+(?:/[\w.+@%~-]*)*", "<path>", value)
        return re.sub(r"(?i)\b(pid(?:\(s\))?s?|process(?:es)?)[ :=#]*\d+(?:, *\d+)*", r"\1 <number>", value)
    if isinstance(value, dict):
        return {key: _anonymous(item) for key, item in value.items() if key not in ("log", "detail_frames", "cwd")}
    return [_anonymous(item) for item in value] if isinstance(value, list | tuple) else value


def _line(name: str, facts: Facts, judge: Judge) -> Line:
    if "failure" in facts:
        meaning = "a search would meet the same; run `autotune doctor --json` and report it"
        return Line(name=name, state=State.DIFFERS, found=facts["failure"], meaning=meaning, facts=facts)
    state, found, meaning = judge(facts)
    return Line(name=name, state=state, found=found, meaning=meaning, facts=facts)
