"""The same path on a CUDA device: what no CPU can show. Skipped, with the reason, where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune import techniques
from autotune.records.outcome import Kind
from autotune.records.settings import ProbeSettings
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent.parent
GPT = ROOT / "studies" / "gpt" / "model.py"
SETTINGS = ProbeSettings(memory_limit_bytes=8 * 2**30, max_timed_s=1.0, timeout_s=120)


@pytest.fixture(scope="module")
def prober(tmp_path_factory):
    with LocalRunner(TaskSource.of(GPT), device="cuda:0", logs=tmp_path_factory.mktemp("logs")) as prober:
        yield prober


def run(prober, **choices):
    return prober.probe(techniques.complete({"batch_size": 12, **choices}, global_batch=48), SETTINGS)


def gpt_after(lines):
    """The study's file with `lines` at its top."""
    future = "from __future__ import annotations\n"
    return future + lines + GPT.read_text().replace(future, "")


def test_probes_are_forked_although_the_module_could_ask_for_cuda(prober):
    assert prober.notes == ()


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_every_precision_trains(prober, amp):
    outcome = run(prober, amp=amp)
    assert outcome.kind is Kind.OK, outcome
    assert outcome.measurement.samples_per_s > 0


def test_tf32_trains(prober):
    assert run(prober, matmul_precision="tf32").kind is Kind.OK


@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
def test_every_optimizer_implementation_trains(prober, implementation):
    assert run(prober, optimizer_impl=implementation).kind is Kind.OK


def test_checkpointing_lowers_the_peak(prober):
    plain = run(prober, batch_size=48).measurement
    checkpointed = run(prober, batch_size=48, checkpoint_segments=6).measurement
    assert checkpointed.memory["allocated_bytes"] < 0.8 * plain.memory["allocated_bytes"]


def test_the_peak_includes_what_lies_outside_the_allocator(prober):
    measured = run(prober).measurement
    assert measured.peak_bytes > measured.memory["reserved_bytes"] > 0


def test_the_memory_limit_makes_a_config_run_out_of_memory(prober):
    config = techniques.complete({"batch_size": 48}, global_batch=48)
    outcome = prober.probe(config, SETTINGS.replace(memory_limit_bytes=900 * 2**20))
    assert outcome.kind is Kind.OOM, outcome
    assert run(prober).kind is Kind.OK


def test_telemetry_is_recorded(prober):
    assert {"temperature_c", "power_w"} <= run(prober).measurement.telemetry.keys()


def test_checks_hold_for_bf16_and_checkpointing(prober):
    config = techniques.complete({"batch_size": 4, "amp": "bf16", "checkpoint_segments": 3})
    check = prober.check(config, SETTINGS, 4)
    assert check.passed, check


def test_a_search_ends_with_a_confirmed_answer(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "search", str(GPT), "--budget", "60s", "--json", "--memory-limit", "16GiB"],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["device"] == "cuda:0"
    assert result["confirmed"] and result["speedup"] >= 1


def test_a_module_that_asks_whether_cuda_is_there_can_still_be_forked(tmp_path):
    model = tmp_path / "asks.py"
    model.write_text(gpt_after("import torch\nDEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'\n"))
    with LocalRunner(TaskSource.of(model), device="cuda:0", logs=tmp_path) as prober:
        assert prober.notes == ()
        assert run(prober).kind is Kind.OK


def test_a_module_that_uses_cuda_at_import_gets_new_interpreters(tmp_path):
    model = tmp_path / "uses.py"
    model.write_text(gpt_after("import torch\ntorch.zeros(1, device='cuda')\n"))
    with LocalRunner(TaskSource.of(model), device="cuda:0", logs=tmp_path) as prober:
        assert "new interpreter" in prober.notes[0]
        assert run(prober).kind is Kind.OK
