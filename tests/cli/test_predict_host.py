"""`autotune predict` on a small host: no model is built for real, and nothing outlives its time or its user."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.units import GIB

MODELS = Path(__file__).parent.parent / "models"
PARAMETER_BYTES = 24 * 4 * (8192 * 8192 + 3 * 8192)
CONFIG = json.dumps({"batch_size": 8})
HANGS = """
import os, time, torch

def build_model():
    open("started", "w").write(str(os.getpid()))
    time.sleep(600)

def make_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)
"""


def command(model: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "autotune", "predict", str(model), *arguments]


def on_a_host_of(
    memory_bytes: int, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))

    return subprocess.run(
        command(MODELS / "wide.py", *arguments),
        cwd=folder,
        env=os.environ | environment,
        preexec_fn=bound,
        capture_output=True,
        text=True,
        timeout=115,
    )


def test_a_model_of_billions_of_parameters_takes_no_memory_of_the_host(tmp_path: Path) -> None:
    done = on_a_host_of(3 * GIB, tmp_path, "--gpu", "80GiB", "--config", CONFIG, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["fits"], found["warnings"]) == (True, [])
    assert found["config"]["parameters_bytes"] == PARAMETER_BYTES
    assert found["config"]["optimizer_bytes"] == pytest.approx(2 * PARAMETER_BYTES, rel=0.001)


@pytest.mark.parametrize(
    "gpu",
    [("--gpu", "80GiB"), pytest.param(("--device", "cpu", "--memory-limit", "80GiB"), marks=pytest.mark.slow)],
)
def test_what_has_to_be_built_for_real_and_does_not_fit_the_host_is_told_as_the_hosts(
    tmp_path: Path, gpu: tuple[str, ...]
) -> None:
    done = on_a_host_of(GIB, tmp_path, *gpu, "--config", CONFIG, READS_VALUES="1")
    assert (done.returncode, done.stdout) == (2, "")
    told = " ".join(done.stderr.split())
    assert "the host has too little memory to build the model" in told and "(wide.py, line " in told
    assert "--memory-limit" not in told and "80.0 GiB" not in told


@pytest.mark.slow  # `prediction/test_fakes.py` holds it without a process
def test_a_model_that_is_built_for_real_is_predicted_and_it_is_said(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    line = "def build_model():\n    assert torch.ones(2**16).sum().item() > 0\n"
    model.write_text("import torch\n" + (MODELS / "tiny.py").read_text().replace("def build_model():\n", line))
    done = subprocess.run(
        command(model, "--gpu", "T4", "--config", json.dumps({"batch_size": 16}), "--json"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=115,
    )
    assert done.returncode == 0, done.stderr
    (warning,) = json.loads(done.stdout)["warnings"]
    assert "built for real, in the host's memory" in warning and "(model.py, line " in warning


@pytest.mark.slow  # a model that the host cannot hold is told by the same words
def test_a_batch_that_the_host_cannot_hold_is_told_as_the_hosts(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n\ndef build_model():\n    return nn.Linear(4, 4)\n\n"
        "def make_batch(n):\n    return torch.ones(n, 2**40, 4), torch.ones(n, 2**40, 4)\n"
    )
    done = subprocess.run(command(model, "--gpu", "T4"), cwd=tmp_path, capture_output=True, text=True, timeout=115)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the host's memory ran out, not the GPU's" in done.stderr and "--memory-limit" not in done.stderr


@pytest.mark.slow  # two processes; `prediction/test_trace_job.py` keeps and reads traces
def test_another_config_in_the_same_folder_is_traced_beside_what_was_kept(tmp_path: Path) -> None:
    for choices in ({}, {"amp": "fp16", "checkpoint_segments": 2}):
        config = json.dumps({"batch_size": 16, **choices})
        arguments = ("--gpu", "T4", "--config", config, "--json")
        done = subprocess.run(
            command(MODELS / "tiny.py", *arguments), cwd=tmp_path, capture_output=True, text=True, timeout=115
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["untraced"] == {} and choices.items() <= found["config"]["config"].items()


def test_the_time_holds_what_the_users_code_does_too(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(HANGS)
    done = subprocess.run(
        command(Path("model.py"), "--gpu", "T4", "--timeout", "20s"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=115,
    )
    assert done.returncode == 2
    assert "took more than 20 s; give it more time with --timeout" in done.stderr
    assert not psutil.pid_exists(int((tmp_path / "started").read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_every_process_of_a_prediction(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "model.py").write_text(HANGS)
    running = subprocess.Popen(
        command(Path("model.py"), "--gpu", "T4"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    started = tmp_path / "started"
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text()):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    children = psutil.Process(running.pid).children(recursive=True)
    assert int(started.read_text()) in {child.pid for child in children}
    running.send_signal(number)
    output = running.communicate(timeout=30)
    assert running.returncode in (130, -signal.SIGTERM, 143), output
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
