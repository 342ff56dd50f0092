"""What a job sends to a worker, and what its failure is to whoever runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from autotune.prediction.traces import plan_traces
from autotune.records.config import ProbeSettings
from autotune.records.outcome import COMPARING, Kind, Outcome
from autotune.runners import worker
from autotune.runners.jobs import (
    AnatomyJob,
    CalibrateJob,
    CheckJob,
    EvaluateJob,
    InspectJob,
    Job,
    JobFailed,
    ModulesJob,
    ProbeJob,
    TraceJob,
)
from autotune.techniques import find_techniques
from tests.closed_form import ClosedFormRunner, inspection

techniques = find_techniques()

CONFIG = techniques.complete({"batch_size": 4})
SETTINGS = ProbeSettings(memory_limit_bytes=2**30)
RUN: dict[str, Any] = {"config": CONFIG, "settings": SETTINGS}
JOBS: list[Job[Any]] = [
    CalibrateJob(),
    InspectJob(memory_limit_bytes=2**30, timeout_s=60.0),
    ProbeJob(**RUN),
    EvaluateJob(**RUN, num_samples=2),
    CheckJob(**RUN, batch_size=2),
    ModulesJob(**RUN),
    TraceJob(plan=plan_traces([CONFIG], find_techniques()), target="cpu", timeout_s=60.0),
    AnatomyJob(configs=(CONFIG,), target="cpu", timeout_s=60.0),
]


def kinds(of: type[Job[Any]]) -> Iterator[type[Job[Any]]]:
    for kind in of.__subclasses__():
        yield from kinds(kind) if kind.__subclasses__() else (kind,)


def test_each_kind_of_job_is_plain_data_for_a_function_of_the_worker() -> None:
    assert {type(job) for job in JOBS} == set(kinds(Job))
    for job in JOBS:
        assert job.name in worker.JOBS and job.timeout_s > 0
        assert json.loads(json.dumps(job.arguments())).keys() == job.arguments().keys()


@dataclass
class Failing(ClosedFormRunner):
    """Answers with these, one after another."""

    answers: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked: list[Job[Any]] = []

    def result_of(self, job: Job[Any]) -> Any:
        self.asked.append(job)
        return self.answers[len(self.asked) - 1]


def test_what_failed_is_raised_with_its_outcome_unless_that_is_the_result() -> None:
    crashed = Outcome(kind=Kind.CRASHED, cause="died of SIGSEGV")
    with pytest.raises(JobFailed, match="died of SIGSEGV") as caught:
        Failing(answers=(crashed,)).run(JOBS[0])
    placed = replace(crashed, slot="slot 0", device="cpu")
    assert caught.value.outcome == placed
    for job in JOBS[2:5]:
        assert Failing(answers=(crashed,)).run(job) == placed


def test_an_inspection_is_made_again_where_others_held_the_memory_and_then_without_what_it_failed_in() -> None:
    crowded = Outcome(kind=Kind.OOM, cause="no memory", crowded=True)
    hung = Outcome(kind=Kind.CRASHED, cause="died of SIGALRM", stage=COMPARING)
    runner = Failing(answers=(crowded, hung, inspection()))
    assert runner.run(InspectJob(memory_limit_bytes=2**30, timeout_s=60.0, comparing_s=1.0)) == inspection()
    compared = [(job.comparing_s, job.not_compared) for job in runner.asked if isinstance(job, InspectJob)]
    assert compared == [(1.0, ""), (1.0, ""), (0.0, "died of SIGALRM")]
