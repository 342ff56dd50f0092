"""The same path on a CUDA device: what no CPU can show. Skipped, with the reason, where there is none.

One process after another uses the device. What a GPU or a torch is too old for is skipped by its capability or version.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autotune.devices import nvml, open_device, selftest
from autotune.devices.targets import target_of
from autotune.doctor import verdicts
from autotune.records.config import ProbeSettings
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind
from autotune.runners.command import Command, CommandRunner
from autotune.runners.jobs import AnatomyJob, CheckJob, InspectJob, ModulesJob
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.units import GIB, MIB
from tests.devices.processes import in_process
from tests.short_play_off import AUTOTUNE

techniques = find_techniques()

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent.parent
GPT = ROOT / "studies" / "gpt" / "model.py"
SETTINGS = ProbeSettings(memory_limit_bytes=8 * 2**30, max_timed_s=1.0, timeout_s=120)


@pytest.fixture(scope="module")
def prober(tmp_path_factory):
    with LocalRunner(TaskSource.of(GPT), device="cuda:0", logs=tmp_path_factory.mktemp("logs")) as prober:
        yield prober


@pytest.fixture(scope="module")
def outside_bytes(prober):
    """What a process has on this card before its model is built: 0.2 GiB on one, 0.7 GiB on another."""
    inspection = prober.run(InspectJob(memory_limit_bytes=None, timeout_s=120))
    assert isinstance(inspection, Inspection), inspection
    return inspection.outside_bytes


def run(prober, **choices):
    return prober.probe(techniques.complete({"batch_size": 12, **choices}, global_batch=48), SETTINGS)


def require(capability, what):
    """Skip where the GPU is older. The driver is asked: this process shall use no device."""
    found = open_device("cuda:0").info().capability
    if found < capability:
        pytest.skip(
            f"{what} needs compute capability {capability[0]}.{capability[1]}, this GPU has {found[0]}.{found[1]}"
        )


def require_compiler():
    """Skip where `torch.compile` lacks something."""
    if reason := open_device("cuda:0").why_not_compiled():
        pytest.skip(reason)


def gpt_after(lines):
    """The study's file with `lines` at its top."""
    future = "from __future__ import annotations\n"
    return future + lines + GPT.read_text().replace(future, "")


def test_the_parts_of_the_peak_and_of_the_time_are_what_the_card_shows(tmp_path, monkeypatch):
    for name in ("GPT_WIDTH", "GPT_CONTEXT"):  # so large that hooks cost little beside what they time
        monkeypatch.setenv(name, "512")
    config = techniques.complete({"batch_size": 12}, global_batch=48)
    with LocalRunner(TaskSource.of(GPT), device="cuda:0", logs=tmp_path) as runner:
        (anatomy,) = runner.run(
            AnatomyJob(configs=(config,), target=target_of(runner.slots()[0].device), timeout_s=100)
        )
        times = runner.run(ModulesJob(config=config, settings=SETTINGS))
        step_s = run(runner).measurement.step_s
    assert anatomy.peak_bytes == pytest.approx(times.allocated_bytes, rel=0.1)
    micro_batch_s = sum(phases.get("forward", 0) + phases.get("backward", 0) for phases in times.seconds.values())
    assert 0.5 * step_s < 4 * micro_batch_s < 3 * step_s


def test_probes_are_forked_although_the_module_could_ask_for_cuda(prober):
    assert prober.notes == ()


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
def test_every_precision_trains(prober, amp):
    if amp == "bf16":
        require((8, 0), "bf16")
    outcome = run(prober, amp=amp)
    assert outcome.kind is Kind.OK, outcome
    assert outcome.measurement.samples_per_s > 0


def test_tf32_trains(prober):
    require((8, 0), "TF32")
    assert run(prober, matmul_precision="tf32").kind is Kind.OK


@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
def test_every_optimizer_implementation_trains(prober, implementation):
    assert run(prober, optimizer_impl=implementation).kind is Kind.OK


def test_checkpointing_lowers_the_peak(prober):
    plain = run(prober, batch_size=48).measurement
    checkpointed = run(prober, batch_size=48, checkpoint_segments=4).measurement
    assert checkpointed.memory["allocated_bytes"] < 0.8 * plain.memory["allocated_bytes"]


def test_the_peak_includes_what_lies_outside_the_allocator(prober):
    measured = run(prober).measurement
    assert measured.peak_bytes > measured.memory["reserved_bytes"] > 0


def test_workspaces_are_booked_with_what_the_allocator_reserves_alone(prober, outside_bytes):
    assert abs(outside_bytes - run(prober).measurement.memory["outside_bytes"]) < 8 * MIB


def test_the_memory_limit_makes_a_config_run_out_of_memory(prober, outside_bytes):
    config = techniques.complete({"batch_size": 48}, global_batch=48)
    outcome = prober.probe(config, SETTINGS.replace(memory_limit_bytes=outside_bytes + 256 * MIB))
    assert outcome.kind is Kind.OOM, outcome
    assert run(prober).kind is Kind.OK


def test_telemetry_is_recorded(prober):
    assert {"temperature_c", "power_w"} <= run(prober).measurement.telemetry.keys()


def test_checks_hold_for_bf16_and_checkpointing(prober):
    require((8, 0), "bf16")
    config = techniques.complete({"batch_size": 4, "amp": "bf16", "checkpoint_segments": 3})
    check = prober.run(CheckJob(config=config, settings=SETTINGS, batch_size=4))
    assert check.passed, check


def test_a_search_ends_with_a_confirmed_answer(tmp_path):
    done = subprocess.run(
        [*AUTOTUNE, "search", str(GPT), "--budget", "60s", "--trials", "4", "--json", "--memory-limit", "80%"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["device"] == "cuda:0"
    assert result["confirmed"] and result["speedup"] >= 1


@pytest.mark.slow  # what asks for more is below
def test_a_module_that_asks_whether_cuda_is_there_can_still_be_forked(tmp_path):
    model = tmp_path / "asks.py"
    model.write_text(gpt_after("import torch\nDEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'\n"))
    with LocalRunner(TaskSource.of(model), device="cuda:0", logs=tmp_path) as prober:
        assert prober.notes == ()
        assert run(prober).kind is Kind.OK


def test_a_module_that_asks_what_the_gpu_can_is_told_and_can_still_be_forked(tmp_path):
    """As torchao does when transformers imports it."""
    model, found = tmp_path / "asks.py", open_device("cuda:0").info().capability
    model.write_text(gpt_after(f"import torch\nassert torch.cuda.get_device_capability() == {found}\n"))
    with LocalRunner(TaskSource.of(model), device="cuda:0", logs=tmp_path) as prober:
        assert prober.notes == ()
        assert run(prober).kind is Kind.OK


def test_a_module_that_uses_cuda_at_import_gets_new_interpreters(tmp_path):
    model = tmp_path / "uses.py"
    model.write_text(gpt_after("import torch\ntorch.zeros(1, device='cuda')\n"))
    with LocalRunner(TaskSource.of(model), device="cuda:0", logs=tmp_path) as prober:
        assert "new interpreter" in prober.notes[0]
        assert run(prober).kind is Kind.OK


def test_alone_on_the_card_nothing_is_contended_and_nothing_disturbs(prober):
    measured = run(prober, batch_size=48).measurement
    assert measured.contention == 0
    assert not [text for text in measured.disturbances if text.startswith("others")]


def test_the_peak_is_what_the_allocator_has_reserved_and_a_context_that_can_be_believed(prober):
    connection = nvml.connect()
    assert isinstance(connection, nvml.Nvml)
    before_bytes = connection.memory(connection.visible_gpus()[0])[0]
    measured = run(prober, batch_size=48).measurement
    detail = measured.memory
    assert measured.peak_bytes == detail["reserved_bytes"] + detail["outside_bytes"]
    assert 64 * MIB < detail["outside_bytes"] < 2 * GIB
    assert before_bytes + measured.peak_bytes < connection.memory(connection.visible_gpus()[0])[1]


@pytest.mark.values
def test_two_probes_agree(prober):
    first, second = (run(prober, batch_size=48).measurement for _ in range(2))
    assert second.samples_per_s == pytest.approx(first.samples_per_s, rel=0.2)  # the host launches kernels unevenly
    assert second.memory["reserved_bytes"] == first.memory["reserved_bytes"]
    assert second.peak_bytes == pytest.approx(first.peak_bytes, rel=0.02)


def test_memory_is_back_after_a_probe_was_killed(prober):
    connection = nvml.connect()
    assert isinstance(connection, nvml.Nvml)
    gpu = connection.visible_gpus()[0]
    run(prober)
    before_bytes = connection.memory(gpu)[0]
    config = techniques.complete({"batch_size": 48}, global_batch=48)
    killed = prober.probe(config, SETTINGS.replace(num_steps=100_000, timeout_s=8))
    assert killed.kind is Kind.TIMEOUT, killed
    open_device("cuda:0").settle()
    deadline = time.monotonic() + 5
    while connection.memory(gpu)[0] > before_bytes + 64 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    assert connection.memory(gpu)[0] <= before_bytes + 64 * MIB
    assert run(prober).kind is Kind.OK


MODEL = """
from __future__ import annotations
import torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((3, 32, 32), index / 4096), index % 10

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

def build_model():
    return Net()

{data}

def configure_optimizers(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)

GLOBAL_BATCH = 64
{more}
"""
MADE = "def make_batch(n):\n    return torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))"


@contextlib.contextmanager
def convolutions(tmp_path, data=MADE, more="", device="cuda:0"):
    model = tmp_path / "convolutions.py"
    model.write_text(MODEL.format(data=data, more=more))
    with LocalRunner(TaskSource.of(model), device=device, logs=tmp_path / "logs") as runner:
        yield runner


def run_convolutions(runner, **choices):
    return runner.probe(techniques.complete({"batch_size": 64, **choices}, global_batch=64), SETTINGS)


def test_a_dataset_is_loaded_by_workers_with_and_without_page_locked_memory(tmp_path):
    with convolutions(tmp_path, data="def train_dataset():\n    return Data()") as runner:
        for num_workers in (0, 2):
            for pin_memory in (False, True):
                outcome = run_convolutions(runner, num_workers=num_workers, pin_memory=pin_memory)
                assert outcome.kind is Kind.OK, (num_workers, pin_memory, outcome)


@pytest.mark.slow  # each of them is above
def test_fp16_with_a_fused_optimizer_and_clipping_trains_and_settles(tmp_path):
    with convolutions(tmp_path, more="MAX_GRAD_NORM = 1.0") as runner:
        outcome = run_convolutions(runner, amp="fp16", optimizer_impl="fused")
        assert outcome.kind is Kind.OK, outcome
        assert outcome.measurement.num_steps > outcome.measurement.skipped_steps


def test_a_model_that_compiles_itself_trains_in_tf32(tmp_path):
    require((8, 0), "TF32")
    require_compiler()
    compiled = (
        MADE
        + "\n\nplain = build_model\n\ndef build_model():\n    model = plain()\n    model.compile()\n    return model"
    )
    with convolutions(tmp_path, data=compiled) as runner:
        config = techniques.complete({"batch_size": 64, "matmul_precision": "tf32"}, global_batch=64)
        outcome = runner.probe(config, SETTINGS.replace(timeout_s=300))
        assert outcome.kind is Kind.OK, outcome


@pytest.mark.slow  # `test_techniques.py` has the benchmark
def test_convolutions_in_channels_last_with_cudnns_benchmark_are_measured_and_feasible(tmp_path):
    with convolutions(tmp_path) as runner:
        outcome = run_convolutions(runner, channels_last=True, cudnn_benchmark=True)
        assert outcome.kind is Kind.OK, outcome
        assert (outcome.measurement.num_alloc_retries, outcome.measurement.num_ooms) == (0, 0)
        exact = techniques.complete({"batch_size": 8, "channels_last": True})
        check = runner.run(CheckJob(config=exact, settings=SETTINGS, batch_size=8))
        assert check.passed, check


def test_checkpointing_keeps_dropouts_masks(tmp_path):
    with convolutions(tmp_path) as runner:
        check = runner.run(
            CheckJob(
                config=techniques.complete({"batch_size": 8, "checkpoint_segments": 2}), settings=SETTINGS, batch_size=8
            )
        )
        assert check.passed and check.exact, check


@pytest.mark.values
def test_after_an_error_that_breaks_the_context_the_next_probe_is_good(tmp_path):
    broken = (
        "def training_step(model, batch):\n"
        "    x, y = batch\n"
        "    return nn.functional.cross_entropy(model(x), y + (1000 if len(x) == 32 else 0))"
    )
    with convolutions(tmp_path, more=broken) as runner:
        sticky = run_convolutions(runner, batch_size=32)
        assert sticky.kind in (Kind.ERROR, Kind.CRASHED), sticky
        assert run_convolutions(runner).kind is Kind.OK


def test_predicted_reserved_memory_is_near_what_is_measured(prober):
    from autotune.prediction.memory import MemoryModel
    from autotune.space import build_space

    inspection = prober.run(InspectJob(memory_limit_bytes=8 * GIB, timeout_s=120))
    assert isinstance(inspection, Inspection), inspection
    space, _ = build_space(inspection, find_techniques())
    config = techniques.complete({"batch_size": 48}, global_batch=48)
    traces = prober.trace([config], target_of(prober.slots()[0].device), 120)
    assert not traces.failures
    estimate = MemoryModel(traces, inspection.outside_bytes, space).estimate(config)
    measured = run(prober, batch_size=48).measurement
    assert estimate.low_bytes <= measured.peak_bytes <= estimate.high_bytes


GREEDY = """
import sys, torch
model = torch.nn.Linear(512, 512, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(10**6):
    model(torch.ones(int(sys.argv[1]), 512, device="cuda")).square().mean().backward()
    optimizer.step()
"""


def test_the_memory_limit_holds_for_a_command_on_a_gpu(tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY)
    command = Command(f"{sys.executable} {tmp_path / 'greedy.py'} {{batch_size}}", {})
    with CommandRunner(command, logs=tmp_path / "logs", device="cuda:0") as runner:
        limited = SETTINGS.replace(memory_limit_bytes=2 * GIB)
        outcome = runner.probe(
            runner.techniques.complete({"batch_size": 10**6}), limited
        )  # 2 GB a batch, and its product
    assert (outcome.kind, outcome.crowded) == (Kind.OOM, False), outcome


def test_training_on_the_cpu_leaves_cuda_alone(tmp_path):
    connection = nvml.connect()
    assert isinstance(connection, nvml.Nvml)
    gpu = connection.visible_gpus()[0]
    before_bytes, seen = connection.memory(gpu)[0], []
    watching = threading.Event()

    def watch():
        while not watching.wait(0.01):
            seen.append(connection.memory(gpu)[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with convolutions(tmp_path, device="cpu") as runner:
            assert run_convolutions(runner).kind is Kind.OK
    finally:
        watching.set()
        watcher.join()
    assert max(seen) <= before_bytes + 64 * MIB


def test_what_the_doctor_looks_at_holds_of_a_gpu():
    limit = in_process(selftest.memory_limit, "cuda:0")
    other, books, clock = (
        in_process(test, "cuda:0") for test in (selftest.other_error, selftest.books, selftest.clock)
    )
    judged = [
        verdicts.judge_limit(limit),
        verdicts.judge_recognition(limit),
        verdicts.judge_other_error(other),
        verdicts.judge_peak(books),
        verdicts.judge_books(books),
    ]
    assert {state for state, _, _ in judged} <= {verdicts.State.OK, verdicts.State.UNAVAILABLE}, judged
    assert 0 < clock["device_s"] <= clock["wall_s"]


@pytest.mark.values
def test_the_doctor_finds_this_machine_well(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "doctor", "--device", "cuda:0", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    broken = {line["name"]: line["found"] for line in json.loads(done.stdout)["lines"] if line["state"] == "differs"}
    assert not broken
