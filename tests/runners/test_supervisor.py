"""The fork server touches no GPU, and hides them from nobody for longer than its own warm-up steps."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.records.check import Check
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind
from autotune.runners.in_flight import InFlight, Stay
from autotune.runners.jobs import CheckJob, InspectJob, ProbeJob
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques

techniques = find_techniques()

# a torch built with CUDA, on a machine with a GPU that must not be touched
PRETEND = """
import torch
import torch._dynamo  # a build without CUDA lacks what this imports of one with it

def touched(*args):
    raise AssertionError("CUDA was initialised")

torch.cuda._is_compiled = lambda: True
torch.backends.cuda.is_built = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.is_available = lambda: True
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
for name in ("_cuda_init", "_accelerator_getDeviceIndex", "_accelerator_getStream", "_cuda_isCurrentStreamCapturing"):
    setattr(torch._C, name, touched)
torch.cuda.is_current_stream_capturing = touched
"""


def python(program):
    return subprocess.run([sys.executable, "-c", PRETEND + program], capture_output=True, text=True)


def test_warming_up_initialises_no_cuda_and_leaves_the_gpu_visible():
    done = python(
        "import os\n"
        "from autotune.runners.supervisor import _import_everything\n"
        "_import_everything()\n"
        "print(torch.cuda.is_available(), torch.cuda.device_count(), os.environ.get('CUDA_VISIBLE_DEVICES'))\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "1", "None"]


@pytest.mark.slow  # why the test above is there
def test_an_optimizer_step_would_initialise_it_otherwise():
    done = python(
        "parameter = torch.nn.Parameter(torch.zeros(1))\n"
        "parameter.grad = torch.zeros(1)\n"
        "torch.optim.AdamW([parameter]).step()\n"
    )
    assert "CUDA was initialised" in done.stderr


MODEL = """
import os
import torch
from torch import nn

AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES")


def build_model():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "a job on the CPU sees GPUs"
    assert AT_IMPORT == "0", "the module did not see the GPU"
    return nn.Linear(4, 2)


def make_batch(batch_size):
    return torch.randn(batch_size, 4), torch.randint(2, (batch_size,))
"""


@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_jobs_on_the_cpu_see_no_gpu_and_the_users_module_sees_all(tmp_path, monkeypatch, fork):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "model.py").write_text(MODEL)
    config = techniques.complete({"batch_size": 2})
    settings = ProbeSettings(memory_limit_bytes=None, num_steps=2)
    with LocalRunner(TaskSource.of(tmp_path / "model.py"), device="cpu", logs=tmp_path, fork=fork) as runner:
        inspection = runner.run(InspectJob(memory_limit_bytes=None, timeout_s=100.0))
        assert getattr(inspection, "cause", "") == ""
        assert runner.probe(config, settings).cause == ""
        assert isinstance(runner.run(CheckJob(config=config, settings=settings, batch_size=2)), Check)


def test_whether_cuda_was_initialised_is_asked_of_torch_and_of_the_drivers_library():
    done = python(
        "import ctypes\nfrom types import SimpleNamespace\nfrom autotune.runners import supervisor\n"
        "of_torch, load = torch.cuda.is_initialized, ctypes.CDLL\n"
        "def ask(is_initialised=of_torch, driver=None):\n"
        "    torch.cuda.is_initialized = is_initialised\n"
        "    ctypes.CDLL = (lambda name, mode: SimpleNamespace(cuDeviceGetCount=driver)) if driver else load\n"
        "    print(supervisor._has_cuda_context())\n"
        "ask()\n"
        "ask(is_initialised=lambda: True)  # under WSL no device file tells\n"
        "ask(driver=lambda count: 3)  # loaded, not initialised\n"
        "ask(driver=lambda count: 0)\n"
    )
    assert done.stdout.split() == ["False", "True", "False", "True"], done.stderr


STUCK = """
import subprocess, time
from autotune.runners import supervisor

supervisor._kill = lambda pid: None  # to the supervisor these look like some that are stuck in a driver
ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
try:
    supervisor._GIVE_UP_S = 0.5
    began_s = time.monotonic()
    assert supervisor._end([rank.pid for rank in ranks]) == [None, None, None]
    assert time.monotonic() - began_s < 1.0
    assert supervisor._stuck == {rank.pid for rank in ranks}
    supervisor._reap_descendants()
    assert [rank.poll() for rank in ranks] == [None, None, None]
    supervisor._GIVE_UP_S = 5.0
    ended = subprocess.Popen(["true"])
    assert supervisor._end([ended.pid]) == [0]
finally:
    for rank in ranks:
        rank.kill()
        rank.wait()
"""


SERVER = """
import multiprocessing
import os
import pathlib

import torch

shared = multiprocessing.get_context("fork").Manager().dict(value=1.0)
pathlib.Path(r"{folder}/pid").write_text(str(shared._manager._process.pid))


def build_model():
    return torch.nn.Linear(4, 4)


def make_batch(batch_size):
    return torch.full((batch_size, 4), shared["value"])


def training_step(model, batch):
    return model(batch).mean()
"""


def test_what_the_users_module_starts_serves_every_job_and_ends_with_the_last(tmp_path):
    (tmp_path / "model.py").write_text(SERVER.format(folder=tmp_path))
    settings = ProbeSettings(memory_limit_bytes=2**33, max_timed_s=0.1, max_warmup_s=0.1, timeout_s=60)
    with LocalRunner(TaskSource.of(tmp_path / "model.py"), device="cpu", logs=tmp_path / "logs") as runner:
        outcomes = [runner.probe(techniques.complete({"batch_size": 4}), settings) for _ in range(2)]
        server = int((tmp_path / "pid").read_text())
        assert psutil.pid_exists(server)
    assert [outcome.kind for outcome in outcomes] == [Kind.OK, Kind.OK], outcomes
    deadline = time.monotonic() + 10
    while psutil.pid_exists(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(server)


def test_killed_processes_that_do_not_end_are_waited_for_together_then_left_alone_and_hold_up_no_later_one():
    # in a process of its own: reaping kills every child, also the tests' fork server
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def ended(**how):
    return {"exit_code": -9, "stuck": False, "timed_out": False, "cancelled": False, "oom_killed": False, **how}


@pytest.mark.parametrize(
    ("how", "on_gpu", "kind", "said"),
    [
        ({"stuck": True, "timed_out": True}, True, Kind.CRASHED, "stuck in a driver"),
        ({"oom_killed": True}, False, Kind.OOM, "out-of-memory killer"),
        ({"oom_killed": True}, True, Kind.CRASHED, "the host's, not the GPU's"),
    ],
)
def test_how_a_process_ended_says_what_it_means_for_the_device(tmp_path, how, on_gpu, kind, said):
    (tmp_path / "log").touch()
    job = ProbeJob(config=techniques.complete({"batch_size": 1}), settings=ProbeSettings(memory_limit_bytes=None))
    outcome = InFlight(Stay(1, job, "cpu", "cpu"), tmp_path / "log", os.open(os.devnull, os.O_RDONLY), on_gpu).result(
        ended(**how)
    )
    assert (outcome.kind, said in outcome.cause) == (kind, True), outcome


IMPORTS_FOR_LONG = """
import pathlib, time
pathlib.Path(__file__).with_name("importing").touch()
time.sleep(3600)
"""
SEARCH = """
import pathlib, sys
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource

folder = pathlib.Path(sys.argv[1])
with LocalRunner(TaskSource.of(folder / "net.py"), device="cpu", logs=folder / "logs"):
    pass
"""


def test_a_search_that_dies_while_the_model_file_is_imported_leaves_nothing(tmp_path):
    (tmp_path / "net.py").write_text(IMPORTS_FOR_LONG)
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(Path(__file__).parents[2])}
    search = subprocess.Popen([sys.executable, "-c", SEARCH, str(tmp_path)], env=environment)
    while not (tmp_path / "importing").exists():
        time.sleep(0.02)
    assert list((tmp_path / "tmp").glob("autotune-*"))
    running = psutil.Process(search.pid).children(recursive=True)
    search.kill()
    search.wait()
    assert not psutil.wait_procs(running, timeout=5)[1]
    assert not list((tmp_path / "tmp").glob("autotune-*"))
