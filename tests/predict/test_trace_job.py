"""Tracing in a process of its own: it can neither hang nor crash what asked for it, and keeps what it found."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune import techniques
from autotune.predict.traces import Traces
from autotune.runners.local import ProcessProber
from autotune.task.source import TaskSource

MODELS = Path(__file__).parent / "models"


def source(name: str) -> TaskSource:
    return TaskSource.of(MODELS / name)


def config(**choices):
    return techniques.complete({"batch_size": 4, "accumulation_steps": 1, **choices})


@pytest.fixture
def prober(tmp_path):
    with ProcessProber(source("faulty.py"), logs=tmp_path) as prober:
        yield prober


def test_every_group_of_a_space_is_traced_once_and_every_config_of_it_is_known(tmp_path):
    configs = [
        config(batch_size=size, amp=amp, optimizer_impl=implementation)
        for size in (1, 4, 16)
        for amp in ("off", "bf16")
        for implementation in ("default", "foreach")
    ]
    with ProcessProber(source("partly_frozen.py"), logs=tmp_path) as prober:
        traces = prober.trace(configs, "cpu", timeout_s=100)
    assert traces.failures == {}
    assert len(traces.models) == len(traces.updates) == 2
    assert all(traces.peak(config) is not None for config in configs)


def test_a_group_that_cannot_be_traced_a_crash_and_the_others_are_told_apart(prober):
    configs = [config(), config(amp="bf16"), config(channels_last=True), config(optimizer_impl="fused")]
    traces = prober.trace(configs, "cpu", timeout_s=100)
    assert traces.peak(config()) is not None
    assert traces.peak(config(optimizer_impl="fused")) is not None
    assert traces.peak(config(amp="bf16")) is None
    assert "SIGABRT" in traces.failures["model: amp=bf16"]
    assert "depends on the values" in traces.failures["model: channels_last=True"]
    assert len(traces.failures) == 2


def test_a_time_out_keeps_what_was_found(prober):
    traces = prober.trace([config(), config(checkpoint_segments=2), config(amp="bf16")], "cpu", timeout_s=8)
    assert traces.peak(config()) is not None
    assert traces.failures.keys() == {"model: checkpoint_segments=2", "model: amp=bf16"}
    assert sorted(traces.failures.values()) == ["killed after 8 s of tracing", "the 8 s for tracing had passed"]


def test_what_is_known_is_not_traced_again(prober):
    known = prober.trace([config()], "cpu", timeout_s=100)
    assert prober.trace([config()], "cpu", timeout_s=0.0, known=known) is known


def test_a_prober_that_fails_is_a_failure_of_the_groups(prober):
    prober._process.kill()
    prober._process.wait()
    traces = prober.trace([config()], "cpu", timeout_s=100)
    assert traces.peak(config()) is not None  # by the process that was started in its place


def test_no_gpu_is_touched_when_a_gpu_is_predicted(prober):
    traces = prober.trace([config()], "cuda", timeout_s=100)
    assert traces.failures == {}
    assert traces.target == "cuda"
    assert isinstance(traces, Traces)
    assert traces.peak(config()).peak_bytes >= 2 * 2**20


def test_the_lengths_of_the_samples_are_found_beside(tmp_path):
    with ProcessProber(source("padded_recurrent.py"), logs=tmp_path) as prober:
        traces = prober.trace([config()], "cpu", timeout_s=100)
    assert traces.failures == {}
    assert 16 * 10 <= traces.lengths.mean_width(1) < traces.lengths.mean_width(24) < 16 * 90
