"""The examples in the docstrings of what others subclass are code that runs."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.devices import Telemetry
from autotune.export import base as exporters
from autotune.probe.observers import base as observers
from autotune.proposers import base as proposers
from autotune.records.config import ProbeSettings
from autotune.records.device import Slot
from autotune.runners import runner as runners
from autotune.runners.in_flight import Host
from autotune.runners.jobs import ProbeJob
from autotune.techniques import base as techniques
from autotune.techniques import find_techniques
from tests.closed_form import ClosedFormRunner, inspection, make_search, measurement
from tests.report.sample_study import answer


def example_of(described: type, home: Any) -> dict[str, Any]:
    """What the example in a class's docstring defines, beside what its file knows."""
    paragraphs = re.split(r"\n\n(?! )", inspect.getdoc(described) or "")
    (example,) = [text for text in paragraphs if re.search(r"^    class ", text, re.MULTILINE)]
    code = textwrap.dedent("\n".join(line for line in example.splitlines() if not line or line.startswith("    ")))
    names = {**vars(home), "json": json, "torch": torch}
    exec(compile(code, f"the example of {described.__name__}", "exec"), names)
    return names


def test_the_techniques_switches_what_it_says_and_puts_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    technique = example_of(techniques.Technique, techniques)["Deterministic"]()
    with technique.restored():
        technique.apply(None, True)
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert technique.validate(True) is True


def test_the_exporter_says_what_it_has_words_for_and_lists_the_rest() -> None:
    result = answer("sqlite:///gpt.db")
    export = example_of(exporters.Exporter, exporters)["Toml"]().export(result, space={})
    assert tomllib.loads(export.text) == {"precision": result.config["amp"], "micro_batch": result.config["batch_size"]}
    assert "accumulation_steps" in export.unsaid


def test_the_proposer_proposes_the_largest_batch_that_is_left(tmp_path: Path) -> None:
    names = example_of(proposers.Proposer, proposers)
    history = make_search(tmp_path, ClosedFormRunner()).history
    proposal = names["SAMPLERS"]["largest-batch"](None, 0).propose(history)
    assert proposal.config.batch_size == max(config.batch_size for config in history.space)


class Line:
    """What a connection to another machine would bring: its slots, and the answers to the jobs that were sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.progress: dict[int, Any] = {}

    def slots(self) -> list[dict[str, Any]]:
        return [Slot(name=name, device=inspection().device).to_dict() for name in ("first", "second")]

    def send(self, request: dict[str, Any]) -> None:
        self.sent.append(request)

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        if not self.sent:
            return None
        return {"ticket": self.sent.pop(0)["ticket"], "outcome": {"kind": "oom", "cause": "it is full"}}

    def close(self) -> None:
        self.sent.clear()


def test_the_runner_sends_jobs_to_slots_and_reads_what_came_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "Host", Host, raising=False)
    monkeypatch.setattr(runners, "connect", lambda address: Line(), raising=False)
    names = example_of(runners.Runner, runners)
    absent = {"now_s": lambda self: 0.0, "cancel": lambda self, ticket: None}
    job = ProbeJob(
        config=find_techniques().complete({"batch_size": 8}), settings=ProbeSettings(memory_limit_bytes=None)
    )
    with type("Remote", (names["Remote"],), absent)("elsewhere", "task") as runner:
        assert runner.task_name == "task"
        tickets = [runner.submit(job, "second"), runner.submit(job)]
        with pytest.raises(RuntimeError, match="all 2 slots are taken"):
            runner.submit(job)
        found = [runner.collect(), runner.collect()]
    assert [one.ticket for one in found] == tickets and runner.collect(0) is None
    assert [(one.result.cause, one.result.slot) for one in found] == [("it is full", "second"), ("it is full", "first")]


def test_the_observer_tells_by_how_much_a_gpu_becomes_warmer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "replace", replace, raising=False)
    warming = example_of(observers.Observer, observers)["Warming"]()
    readings = iter([50.0, 62.0, 58.0])
    device: Any = SimpleNamespace(telemetry=lambda: Telemetry(values={"temperature_c": next(readings)}))
    warming.start(device)
    for step in range(2):
        warming.sample(device, step)
    measured = measurement(find_techniques().complete({"batch_size": 8}), 100.0, 2**30)
    assert warming.stop(device, measured).telemetry == {"warmed_c": 12.0}
    assert warming.stop(device, replace(measured, cut_short=True)).telemetry == {}
