"""Tracing in a process of its own: it can neither hang nor crash what asked for it, and keeps what it found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotune.prediction.job import trace_plan
from autotune.prediction.traces import Traces, plan_traces
from autotune.runners.local import LocalRunner
from autotune.task import Task
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques

techniques = find_techniques()

MODELS = Path(__file__).parent / "models"


def source(name: str) -> TaskSource:
    return TaskSource.of(MODELS / name)


def config(**choices):
    return techniques.complete({"batch_size": 4, "accumulation_steps": 1, **choices})


@pytest.fixture(scope="module")
def prober(tmp_path_factory):
    """Its process lives through what the traces of other tests do to theirs, and imports torch once for all of them."""
    with LocalRunner(source("faulty.py"), logs=tmp_path_factory.mktemp("faulty")) as prober:
        yield prober


@pytest.fixture(scope="module")
def partly_frozen(tmp_path_factory):
    with LocalRunner(source("partly_frozen.py"), logs=tmp_path_factory.mktemp("partly_frozen")) as prober:
        yield prober


def test_every_group_of_a_space_is_traced_once_and_every_config_of_it_is_known(partly_frozen):
    configs = [
        config(batch_size=size, checkpoint_segments=segments, optimizer_impl=implementation)
        for size in (1, 4, 16)
        for segments in (0, 2)
        for implementation in ("default", "foreach")
    ]
    traces = partly_frozen.trace(configs, "cpu", timeout_s=100)
    assert traces.failures == {}
    assert len(traces.models) == len(traces.updates) == 2
    assert all(traces.peak(config, find_techniques()) is not None for config in configs)


def test_a_training_set_of_one_sample_cannot_be_traced_and_that_is_said(tmp_path):
    task = Task(
        build_model=lambda: torch.nn.Linear(3, 2),
        train_dataset=lambda: [torch.ones(3)],
        training_step=lambda model, batch: model(batch).mean(),
    )
    plan = plan_traces([techniques.complete({"batch_size": 1, "accumulation_steps": 1})], techniques)
    failed = [found["traces"]["failures"] for found in trace_plan(task, plan, "cpu") if "traces" in found]
    assert failed and all("a single sample" in str(failures) and "fault" not in str(failures) for failures in failed)


def test_a_group_whose_trace_crashes_and_the_others_are_told_apart(prober):
    configs = [config(), config(amp="bf16"), config(channels_last=True), config(optimizer_impl="fused")]
    traces = prober.trace(configs, "cuda", timeout_s=100)  # for a CPU that emulates bf16 there is no tracing it
    assert traces.peak(config(), find_techniques()) is not None
    assert traces.peak(config(optimizer_impl="fused"), find_techniques()) is not None
    assert traces.peak(config(amp="bf16"), find_techniques()) is None
    assert "SIGABRT" in traces.failures["model: amp=bf16"]
    assert traces.peak(config(channels_last=True), find_techniques()) is not None
    assert len(traces.failures) == 1


def test_a_technique_says_why_its_memory_is_learned_from_probes(partly_frozen):
    configs = [config(), config(optimizer_in_backward=True)]
    traces = partly_frozen.trace(configs, "cpu", timeout_s=100)
    assert "not traced" in traces.failures["optimizer: optimizer_in_backward=True"]
    assert traces.peak(configs[0], find_techniques()) is not None and traces.peak(configs[1], find_techniques()) is None


@pytest.mark.arithmetic
def test_what_the_processor_emulates_is_not_traced_and_the_reason_is_said(avx2, tmp_path):
    short = [config(amp="bf16"), config(amp="fp16")]
    with LocalRunner(source("partly_frozen.py"), logs=tmp_path) as prober:
        traces = prober.trace([config(), *short], "cpu", timeout_s=100)
        on_gpu = prober.trace(short, "cuda", timeout_s=100)
    assert traces.peak(config(), find_techniques()) is not None
    for each in short:
        amp = each["amp"]
        assert traces.peak(each, find_techniques()) is None
        assert f"emulates {amp}" in traces.failures[f"model: amp={amp}"]
        assert on_gpu.peak(each, find_techniques()) is not None  # its arithmetic is not this processor's


def test_a_time_out_keeps_what_was_found_and_another_call_goes_on(prober):
    traces = prober.trace([config(), config(checkpoint_segments=2), config(channels_last=True)], "cpu", timeout_s=8)
    assert traces.peak(config(), find_techniques()) is not None
    assert traces.failures.keys() == {"model: checkpoint_segments=2"}
    assert "killed after 8" in traces.failures["model: checkpoint_segments=2"]
    assert traces.peak(config(channels_last=True), find_techniques()) is None
    more = prober.trace([config(), config(channels_last=True)], "cpu", timeout_s=100, known=traces)
    assert more.peak(config(channels_last=True), find_techniques()) is not None


def test_no_group_is_begun_after_the_slice_but_one_that_each_slice_gets_further_by(prober):
    configs, traces = [config(), config(channels_last=True)], None
    for known in range(1, 4):
        traces = prober.trace(configs, "cpu", timeout_s=100, slice_s=1e-6, known=traces)
        assert len(traces.models) + len(traces.updates) == known
    assert traces.failures == {} and traces.peak(configs[1], find_techniques()) is not None


def test_what_is_known_is_not_traced_again(prober):
    known = prober.trace([config()], "cpu", timeout_s=100)
    assert prober.trace([config()], "cpu", timeout_s=0.0, known=known) is known


def test_a_prober_that_fails_is_a_failure_of_the_groups(prober):
    prober._connection._process.kill()
    prober._connection._process.wait()
    traces = prober.trace([config()], "cpu", timeout_s=100)
    assert traces.peak(config(), find_techniques()) is not None  # by the process that was started in its place


def test_no_gpu_is_touched_when_a_gpu_is_predicted(prober):
    traces = prober.trace([config()], "cuda", timeout_s=100)
    assert traces.failures == {}
    assert traces.target == "cuda"
    assert isinstance(traces, Traces)
    assert traces.peak(config(), find_techniques()).peak_bytes >= 2 * 2**20


def test_the_lengths_of_the_samples_are_found_beside(tmp_path):
    with LocalRunner(source("padded_recurrent.py"), logs=tmp_path) as prober:
        traces = prober.trace([config()], "cpu", timeout_s=100)
    assert traces.failures == {}
    assert 16 * 10 <= traces.lengths.mean_width(1) < traces.lengths.mean_width(24) < 16 * 90
