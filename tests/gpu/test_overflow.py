"""On a GPU, where fp16 is at home: an overflow is traced to its module, and the runner's outcome names it."""

import pytest

from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques

techniques = find_techniques()

pytestmark = [pytest.mark.gpu, pytest.mark.values]

MODEL = """
import torch
from torch import nn


class Square(nn.Module):
    def forward(self, x):
        return (x + 300) * (x + 300)  # beyond fp16's 65504


class Block(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.linear, self.norm, self.gate = nn.Linear(64, 64), nn.LayerNorm(64), gate

    def forward(self, x):
        return x + self.norm(self.gate(self.linear(x)))


def build_model():
    return nn.Sequential(Block(nn.GELU()), Block(Square()), Block(nn.Tanh()))


def make_batch(batch_size):
    return torch.randn(batch_size, 64), torch.randn(batch_size, 64)
"""


def test_an_overflow_in_fp16_names_its_module(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    settings = ProbeSettings(memory_limit_bytes=None, timeout_s=120)
    with LocalRunner(TaskSource.of(path), device="cuda:0", logs=tmp_path / "logs") as runner:
        outcome = runner.probe(techniques.complete({"batch_size": 8, "amp": "fp16"}), settings)
        assert runner.probe(techniques.complete({"batch_size": 8}), settings).kind is Kind.OK
    assert outcome.kind is Kind.NONFINITE
    assert (outcome.overflow.phase, outcome.overflow.module) == ("forward", "1.gate")
    assert outcome.overflow.finite_in_fp32
    assert "1.gate (Square); in fp32 it is finite, so keep it in fp32" in outcome.cause
