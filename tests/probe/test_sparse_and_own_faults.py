"""Sparse gradients are gradients, and an exception in a line of the package is not put down to the user's code."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.coupling.draws import dropout_off
from autotune.devices.cpu import CpuDevice
from autotune.probe import finite
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind
from autotune.runners import worker
from autotune.runners.failure import failure
from autotune.task import load_task
from autotune.task.usercode import arose_in_autotune
from autotune.techniques import find_techniques

techniques = find_techniques()

MODELS = Path(__file__).parent.parent / "models"


def probe(task, **choices):
    settings = ProbeSettings(memory_limit_bytes=None, num_steps=3, max_warmup_s=0.1)
    arguments = {"config": techniques.complete({"batch_size": 4, **choices}, global_batch=48).as_dict()}
    arguments |= {"device": "cpu", "settings": settings.to_dict()}
    return worker._probe(task, arguments, lambda progress: None)["outcome"]


@pytest.fixture(autouse=True)
def gpus_stay_visible(monkeypatch):
    """A job on the CPU hides them from its process, which here is the tests' own."""
    monkeypatch.setattr(worker, "hide_gpus", lambda: None)


@pytest.fixture
def sparse(tmp_path):
    return load_task(shutil.copy(MODELS / "sparse.py", tmp_path))


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_a_model_with_sparse_gradients_is_measured(sparse, amp):
    outcome = probe(sparse, amp=amp)
    assert (outcome["kind"], outcome["cause"]) == (Kind.OK, "")


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_batch_is_measured(sparse, layout):
    def make_batch(batch_size):
        return torch.eye(batch_size, 16).to_sparse(layout=layout), torch.randint(4, (batch_size,))

    task = replace(sparse, build_model=Sparse, make_batch=make_batch, configure_optimizers=None)
    outcome = probe(task)
    assert (outcome["kind"], outcome["cause"]) == (Kind.OK, "")


class Sparse(torch.nn.Module):
    """A linear layer of a sparse matrix."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 4))

    def forward(self, x):
        return x @ self.weight


def test_an_exception_in_a_line_of_autotune_is_its_own_fault_and_said_so(sparse, monkeypatch):
    monkeypatch.setattr(finite, "dense_values", lambda gradient: gradient)  # as it was: isfinite refuses sparse ones
    outcome = probe(sparse)
    assert (outcome["kind"], outcome["own_fault"]) == (Kind.ERROR, True)
    assert outcome["cause"].startswith("a fault of autotune itself: NotImplementedError: ")
    assert "finite.py" in outcome["detail"]


def test_an_exception_in_the_users_code_or_in_torch_called_by_it_is_not(sparse):
    def broken(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1][:-1])

    outcome = probe(replace(sparse, training_step=broken))
    assert (outcome["kind"], outcome["own_fault"]) == (Kind.ERROR, False)
    assert "broken" in outcome["detail"] and not outcome["cause"].startswith("a fault")


def test_a_full_disk_is_nobodys_fault():
    with pytest.raises(TypeError) as raised:
        CpuDevice().limit_memory("many")
    assert arose_in_autotune(raised.value)
    full = OSError(28, "No space left on device").with_traceback(raised.value.__traceback__)
    assert not arose_in_autotune(full)


@pytest.mark.parametrize(
    "fails",
    [lambda: torch.randn(2, 3) @ torch.randn(2, 3), lambda: torch.randn(1).sum().backward()],
    ids=["forward", "backward"],
)
def test_what_torch_raises_in_an_operator_that_is_only_passed_on_is_not_autotunes_own_fault(fails):
    with pytest.raises(RuntimeError) as raised, dropout_off(torch.nn.Linear(1, 1)):
        fails()
    assert not arose_in_autotune(raised.value)


def test_an_error_of_the_gpu_is_not_autotunes_own_fault_whichever_line_met_it():
    """Kernels run after the line that called them."""
    with pytest.raises(TypeError) as raised:
        CpuDevice().limit_memory("many")
    text = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"
    broken = RuntimeError(text).with_traceback(raised.value.__traceback__)
    assert arose_in_autotune(broken)
    outcome = failure(broken, "checks", 0.0)
    assert (outcome.kind, outcome.own_fault) == (Kind.ERROR, False)
    assert outcome.cause.startswith("RuntimeError: CUDA error: an illegal memory access")
