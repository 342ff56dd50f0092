"""Tracing takes a share of the budget between the probes, or none beside them, and goes on where it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.devices import capabilities_of
from autotune.prediction.job import trace_plan
from autotune.prediction.traces import Group, ModelTrace, Traces, plan_traces
from autotune.proposers.cost_model import CostModel
from autotune.records.config import Config, ProbeSettings
from autotune.records.inspection import Inspection, Support
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind
from autotune.runners.jobs import InspectJob, Job, ProbeJob, TraceJob
from autotune.runners.local import LocalRunner
from autotune.runners.runner import Finished, ProbeFault
from autotune.space import build_space
from autotune.study.caches import TraceCache
from autotune.task import Task
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.tuning.explore import explore, measure_baseline
from autotune.tuning.search import search
from autotune.tuning.trace_ahead import Tracing
from autotune.units import MIB
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection, make_search
from tests.notes import Notes
from tests.prediction.test_traces import DEFAULT, PLAIN, fit, piece

techniques = find_techniques()

MODELS = Path(__file__).parent.parent / "models"
CONFIGS = [techniques.complete({"batch_size": 4, "checkpoint_segments": n}) for n in (0, 1, 2, 3)]
GROUP_S = 2.0
FACTS = inspection().facts


@dataclass
class Slow(ClosedFormRunner):
    """Each group takes two seconds of its clock; a job traces one, and is killed when its time is up before."""

    def result_of(self, job: Job[Any]) -> Any:
        if isinstance(job, InspectJob):
            return inspection()
        if not isinstance(job, TraceJob):
            return super().result_of(job)
        self.waited_s += min(GROUP_S, job.timeout_s)
        label = job.plan.labels()[0]
        if job.timeout_s < GROUP_S:
            return Traces(target="cpu", failures={label: f"killed after {job.timeout_s:.0f} s, during tracing"})
        if job.plan.updates:
            return Traces(target="cpu", updates={job.plan.updates[0]: DEFAULT})
        return Traces(target="cpu", models={job.plan.models[0]: PLAIN})


def test_when_time_is_up_nothing_has_failed_and_the_next_search_goes_on(tmp_path: Path) -> None:
    spent = []
    for _ in range(4):
        cache = TraceCache(tmp_path, FACTS, "cpu", [4], {})
        tracing = Tracing(Slow(), lambda: CONFIGS, "cpu", cache, max_s=7.0)
        while not tracing.is_done:
            tracing.advance()
        assert not tracing.traces.failures
        spent.append((tracing.wall_s, len(tracing.missing)))
    assert all(wall_s <= 7.5 for wall_s, _ in spent)
    missing = [left for _, left in spent]
    assert missing[0] > missing[1] > missing[-1] == 0


def test_what_was_kept_is_confirmed_and_more_is_traced_in_the_same_slice(tmp_path: Path) -> None:
    for configs in (CONFIGS[:1], CONFIGS):
        cache = TraceCache(tmp_path, FACTS, "cpu", [4], {})
        tracing = Tracing(Slow(), lambda configs=configs: configs, "cpu", cache, max_s=60.0)
        tracing.advance(60.0)
        assert tracing.missing == [] and tracing.is_done


class Telling(Slow):
    """Tells of the first group before the trace ends."""

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        return super().collect(timeout_s) if timeout_s is None or self.asked else None

    asked = False

    def found(self, ticket: int) -> Traces | None:
        self.asked = True
        return Traces(target="cpu", models={(): PLAIN}, updates={(): DEFAULT})


def test_who_waits_is_told_of_plain_training_before_the_rest_is_traced() -> None:
    told: list[Traces] = []
    tracing = Tracing(Telling(), lambda: CONFIGS, "cpu", None, max_s=60.0)
    tracing.advance(60.0, told.append)
    assert told[0].knows_plain and len(told[0].models) == 1
    assert tracing.missing == []


def test_a_search_traces_in_a_twentieth_of_its_budget_and_says_that_the_time_was_up(tmp_path: Path) -> None:
    notes = Notes()
    options = SearchOptions(budget_s=100.0, num_trials=6, storage=str(tmp_path / "closed.db"), sampler="cost-model")
    result = search(None, options, runner=Slow(noise=0.01), listener=notes)
    assert result.split_s["tracing"] <= 5.5
    (told,) = [text for text in notes.texts if "trac" in text and "predicted" not in text]
    assert "the time for tracing was up (5.0 s)" in told and "killed" not in told


@dataclass
class Noting(ClosedFormRunner):
    """Traces whatever is asked for at once, and notes it, and the configs that are probed."""

    noted: list[Config | list[str]] = field(default_factory=list)

    def result_of(self, job: Job[Any]) -> Any:
        if isinstance(job, TraceJob):
            self.noted.append(job.plan.labels())
            models, updates = map(self.traced, job.plan.models), dict.fromkeys(job.plan.updates, DEFAULT)
            return Traces(target="cpu", models=dict(zip(job.plan.models, models, strict=True)), updates=updates)
        if isinstance(job, ProbeJob):
            self.noted.append(job.config)
        return super().result_of(job)

    def traced(self, group: Group) -> ModelTrace:
        """What the closed form takes for each sample."""
        alone, two = (self.peak_bytes(techniques.complete({**dict(group), "batch_size": size})) for size in (1, 2))
        held = fit(piece(0, two - alone))
        return replace(PLAIN, alone=held, beside=held)


SCARCE_BYTES = 500 * MIB
ALL = plan_traces(build_space(inspection(), techniques)[0].tracing(), techniques)


def probed_in_turn(
    folder: Path,
    found: Inspection,
    sampler: str = "cost-model",
    limit_bytes: int = LIMIT_BYTES,
    kind: type[Noting] = Noting,
) -> list[Config | list[str]]:
    """The configs that a search probes, and what it traces between them."""
    runner = kind(limit_bytes=limit_bytes)
    made = make_search(folder, runner, sampler=sampler, num_trials=3, inspection=found, limit_bytes=limit_bytes)
    made.tracing = Tracing(runner, made.history.space.tracing, "cpu", None, max_s=60.0)
    made.cost_model = CostModel(lambda: made.tracing.traces, outside_bytes=200 * MIB)
    measure_baseline(made)
    explore(made, made.proposer())
    return runner.noted


@pytest.mark.parametrize("sampler", ["cost-model", "random", "gp"])
def test_the_first_config_after_the_baseline_waits_for_no_traces_but_its_own(tmp_path: Path, sampler: str) -> None:
    baseline, own, second, others, _ = probed_in_turn(tmp_path, inspection(), sampler, SCARCE_BYTES)
    assert isinstance(baseline, Config) and isinstance(second, Config)
    assert own == ALL.needed_by([baseline, second], techniques).labels()
    assert isinstance(others, list) and {*others} == {*ALL.labels()} - {*own} != set()


class Needy(Noting):
    """Larger batches than the baseline's leave no headroom, which no trace shows."""

    def peak_bytes(self, config: Config) -> int:
        return super().peak_bytes(config) if config.batch_size <= 4 else self.limit_bytes - MIB


def test_until_something_beside_the_baseline_fits_only_what_comes_next_is_traced(tmp_path: Path) -> None:
    noted = probed_in_turn(tmp_path, inspection(), limit_bytes=600 * MIB, kind=Needy)
    baseline, second, third = (one for one in noted if isinstance(one, Config))
    assert baseline.batch_size == third.batch_size < second.batch_size
    traced = {label for one in noted if isinstance(one, list) for label in one}
    assert traced == {*ALL.needed_by([baseline, second, third], techniques).labels()}


@pytest.mark.parametrize("sampler", ["cost-model", "random", "gp"])
def test_the_first_config_after_the_baseline_does_not_wait_for_its_own_where_it_is_sure_to_fit(
    tmp_path: Path, sampler: str
) -> None:
    baseline, own, second, others, _ = probed_in_turn(tmp_path, inspection(), sampler, 100 * LIMIT_BYTES)
    assert isinstance(baseline, Config) and isinstance(second, Config)
    assert own == ALL.needed_by([baseline], techniques).labels()
    assert isinstance(others, list) and {*others} == {*ALL.labels()} - {*own} != set()


def test_a_config_whose_memory_cannot_be_traced_waits_for_nothing_but_plain_training(tmp_path: Path) -> None:
    untraceable = Support(choices=("off", "bf16"), untraceable=(("bf16", "it is emulated"),))
    baseline, traced, second, *_ = probed_in_turn(
        tmp_path, inspection(support={**inspection().support, "amp": untraceable})
    )
    assert isinstance(baseline, Config) and isinstance(second, Config) and second["amp"] == "bf16"
    assert traced == ALL.needed_by([baseline, second.replace(amp="off")], techniques).labels()


def test_where_the_baseline_does_not_fit_the_fastest_that_may_fit_is_traced_before_it_is_probed(tmp_path: Path) -> None:
    too_large = techniques.complete({"batch_size": 24}, global_batch=96)
    baseline, own, second, others, _ = probed_in_turn(tmp_path, inspection(baseline=too_large.as_dict()))
    assert baseline == too_large
    assert isinstance(second, Config) and (second["amp"], second["optimizer_impl"]) == ("bf16", "fused")
    assert own == ALL.needed_by([too_large, second], techniques).labels()
    assert isinstance(others, list) and {*others} == {*ALL.labels()} - {*own} != set()


class Endless(ClosedFormRunner):
    """Traces never end."""

    def collect(self, timeout_s: float | None = None) -> None:
        assert timeout_s == 0
        return


def test_tracing_beside_the_probes_holds_none_of_them_up(tmp_path: Path) -> None:
    runner = ClosedFormRunner()
    made = make_search(tmp_path, runner, sampler="cost-model", num_trials=6)
    made.tracing = Tracing(runner, lambda: CONFIGS, "cuda", None, 0.0, beside=Endless())
    measure_baseline(made)
    explore(made, made.proposer())
    assert len(runner.configs) == 6 and not made.tracing.is_done and made.tracing.wall_s == 0


class Dying(ClosedFormRunner):
    """Its process ends in the middle of a trace."""

    def collect(self, timeout_s: float | None = None) -> None:
        raise ProbeFault("the process ended")


def test_tracing_that_failed_is_not_said_to_have_had_no_time(tmp_path: Path) -> None:
    runner, notes = ClosedFormRunner(), Notes()
    made = make_search(tmp_path, runner, sampler="cost-model", num_trials=3, listener=notes)
    made.tracing = Tracing(runner, lambda: CONFIGS, "cuda", None, 0.0, beside=Dying())
    measure_baseline(made)
    explore(made, made.proposer())
    (told,) = [text for text in notes.texts if "trac" in text]
    assert told.startswith("tracing failed (the process ended) with 5 combinations of techniques to go")


def test_a_real_process_traces_while_another_one_probes(tmp_path: Path) -> None:
    source = TaskSource.of(MODELS / "tiny.py")
    config = techniques.complete({"batch_size": 4}, global_batch=48)
    settings = ProbeSettings(memory_limit_bytes=2**31)
    with LocalRunner(source, logs=tmp_path, device="cpu") as runner:
        beside = LocalRunner(source, logs=tmp_path / "beside", device="cpu")
        with Tracing(runner, lambda: [config], "cuda", None, 0.0, beside=beside) as tracing:
            tracing.advance_beside()
            assert runner.probe(config, settings).kind is Kind.OK
            deadline = time.monotonic() + 60
            while not tracing.is_done and time.monotonic() < deadline:
                tracing.advance_beside()
                time.sleep(0.05)
            assert tracing.traces.peak(config, find_techniques()) is not None


@pytest.mark.parametrize(("kind", "is_beside"), [("cpu", False), ("cuda", True)])
def test_only_a_gpus_probes_leave_the_processor_to_tracing(tmp_path: Path, kind: str, is_beside: bool) -> None:
    runner = LocalRunner(TaskSource.of(MODELS / "tiny.py"), logs=tmp_path, device="cpu")
    runner._device.capabilities = capabilities_of(kind)
    tracer = runner.tracer()
    assert isinstance(tracer, LocalRunner) == is_beside
    if isinstance(tracer, LocalRunner):
        probe = ProbeJob(config=techniques.complete({"batch_size": 1}), settings=ProbeSettings(memory_limit_bytes=None))
        stay = runner._host.take({"cuda:0": "cuda:0"}, probe)
        tracer._host.take(
            {"cpu": "cpu"}, TraceJob(plan=plan_traces([], find_techniques()), target="cpu", timeout_s=1.0)
        )
        assert stay.beside == ["trace on cpu"]


def test_what_is_left_unfinished_is_beside_nothing_that_runs_later(tmp_path: Path) -> None:
    runner = LocalRunner(TaskSource.of(MODELS / "tiny.py"), logs=tmp_path, device="cpu")
    job = InspectJob(memory_limit_bytes=None, timeout_s=60.0)
    with runner:
        runner.submit(job)
    assert runner._host.take({"cuda:0": "cuda:0"}, job).beside == []


def test_a_model_that_needs_a_tensors_values_is_tried_once_for_all_its_techniques() -> None:
    import torch
    from torch import nn

    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x[(x > 0).any(1).nonzero().squeeze(1)]).sum()

    task = Task(
        name="choosing",
        build_model=Choosing,
        make_batch=lambda batch_size: torch.rand(batch_size, 4),
        training_step=lambda model, batch: model(batch),
    )
    plan = plan_traces([*CONFIGS, techniques.complete({"batch_size": 4, "optimizer_impl": "fused"})], find_techniques())
    messages = list(trace_plan(task, plan, "cpu"))
    assert [message for message in messages if "begun" in message] == [{"begun": "model: nothing switched on"}]
    failures = messages[-1]["traces"]["failures"]
    assert failures.keys() == {*plan.labels()} and "values of a tensor" in next(iter(failures.values()))
