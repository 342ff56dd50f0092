"""A value that is not finite is traced to the module that first made it, among ordinary ones."""

import time

import pytest
import torch
from torch import nn

from autotune.devices import open_device
from autotune.probe.overflow import first_overflow
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind, Outcome, Overflow, Progress
from autotune.runners import worker
from autotune.task import Task

torch.set_num_threads(1)


class Exp(nn.Module):
    def __init__(self, most):
        super().__init__()
        self.most = most

    def forward(self, x):
        return torch.exp(x.clamp(-1, 1) + self.most)


class SqrtOfZero(nn.Module):
    """Finite forward; its derivative at zero is not."""

    def forward(self, x):
        return torch.sqrt(x * 0)


class ExpInside(nn.Module):
    """Its own code overflows, and a layer of its is the first to see that."""

    def __init__(self, most):
        super().__init__()
        self.most = most
        self.after = nn.Linear(8, 8)

    def forward(self, x):
        return self.after(torch.exp(x.clamp(-1, 1) + self.most))


class Masked(nn.Module):
    """Minus infinity where it is meant to be: softmax makes zeros of it."""

    def forward(self, x):
        return x.masked_fill(torch.arange(8, device=x.device) > 4, -torch.inf)


class Block(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.linear, self.norm, self.gate = nn.Linear(8, 8), nn.LayerNorm(8), gate

    def forward(self, x):
        return x + self.gate(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self, gate):
        super().__init__()
        gates = (nn.GELU(), nn.Sequential(Masked(), nn.Softmax(-1)), gate, nn.Tanh())
        self.blocks = nn.ModuleList(map(Block, gates))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def pairs(batch_size):
    return torch.randn(batch_size, 8), torch.randint(0, 8, (batch_size,))


def found(gate, amp="off", **changes):
    task = Task(**{"build_model": lambda: Net(gate()), "make_batch": pairs, **changes})
    settings = ProbeSettings(memory_limit_bytes=None, max_timed_s=0.1, max_warmup_s=0.1)
    config = {"batch_size": 4, "amp": amp}
    until_s = time.perf_counter() + 60
    return first_overflow(task, config, open_device("cpu"), settings, lambda progress: None, Progress(), until_s)


GATE = {"module": "blocks.2.gate", "value": "inf"}


@pytest.mark.parametrize(
    ("amp", "most", "finite_in_fp32"), [("fp16", 15, True), ("bf16", 100, False), ("off", 100, False)]
)
def test_an_overflow_is_traced_to_its_module_and_tried_in_fp32(amp, most, finite_in_fp32):
    expected = Overflow(phase="forward", kind="Exp", finite_in_fp32=finite_in_fp32, **GATE)
    assert found(lambda: Exp(most), amp) == expected


def test_code_of_a_module_that_calls_others_is_the_modules():
    assert found(lambda: ExpInside(100)) == Overflow(phase="forward", kind="ExpInside", finite_in_fp32=False, **GATE)


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_a_derivative_is_traced_to_its_module(amp):
    overflow = found(SqrtOfZero, amp)
    assert (overflow.phase, overflow.module, overflow.operator) == ("backward", "blocks.2.gate", "SqrtBackward0")
    assert "first made in the backward pass of blocks.2.gate (SqrtOfZero) by SqrtBackward0" in str(overflow)


def test_what_is_outside_of_modules_is_said_to_be():
    def training_step(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * torch.inf

    assert found(nn.GELU, training_step=training_step) == Overflow(phase="loss", value="inf")
    overflow = found(nn.GELU, make_batch=lambda n: (pairs(n)[0] / 0, pairs(n)[1]))
    assert (overflow.phase, overflow.kind) == ("input", "Net")


@pytest.mark.parametrize(("timeout_s", "num_runs"), [(600.0, 2), (1e-3, 1)])
def test_a_probe_runs_again_only_where_time_is_left(monkeypatch, timeout_s, num_runs):
    monkeypatch.setattr(worker, "hide_gpus", lambda: None)  # from the tests that follow
    built = []

    def build_model():
        built.append(Net(Exp(100)))
        return built[-1]

    task = Task(build_model=build_model, make_batch=pairs)
    settings = ProbeSettings(memory_limit_bytes=None, timeout_s=timeout_s)
    arguments = {"config": {"batch_size": 4}, "device": "cpu", "settings": settings.to_dict()}
    outcome = Outcome.from_dict(worker.JOBS["probe"](task, arguments, lambda progress: None)["outcome"])
    assert outcome.kind is Kind.NONFINITE and len(built) == num_runs
    assert (outcome.overflow is not None) == (num_runs == 2)


def test_training_that_is_finite_has_no_overflow():
    assert found(nn.GELU) is None
    assert found(nn.GELU, "fp16") is None
