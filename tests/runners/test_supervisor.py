"""The fork server touches no GPU, and hides them from nobody for longer than its own warm-up steps."""

import subprocess
import sys

import pytest

from autotune import techniques
from autotune.records.settings import ProbeSettings
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource

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


@pytest.mark.parametrize("fork", [True, False])
def test_jobs_on_the_cpu_see_no_gpu_and_the_users_module_sees_all(tmp_path, monkeypatch, fork):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "model.py").write_text(MODEL)
    config = techniques.complete({"batch_size": 2})
    settings = ProbeSettings(memory_limit_bytes=None, num_steps=2)
    with LocalRunner(TaskSource.of(tmp_path / "model.py"), device="cpu", logs=tmp_path, fork=fork) as runner:
        inspection = runner.inspect(memory_limit_bytes=None, timeout_s=100.0)
        assert getattr(inspection, "cause", "") == ""
        assert runner.probe(config, settings).cause == ""
        assert getattr(runner.check(config, settings, 2), "cause", "") == ""
