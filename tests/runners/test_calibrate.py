"""A local runner measures its device, and what it finds decides which precisions are offered."""

from pathlib import Path

import pytest

from autotune.runners.jobs import CalibrateJob, InspectJob
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from tests.arithmetic import needs_bf16_arithmetic

MODELS = Path(__file__).parent.parent / "models"
CONVOLUTIONS = """
import torch

def build_model():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(3136, 4))

def make_batch(n):
    return torch.randn(n, 3, 16, 16), torch.randint(0, 4, (n,))
"""


def inspected(model, logs, *, fork=True):
    with LocalRunner(TaskSource.of(model), device="cpu", logs=logs, fork=fork) as runner:
        calibration = runner.run(CalibrateJob())
        inspection = runner.run(InspectJob(memory_limit_bytes=None, timeout_s=60, calibration=calibration))
    return calibration, inspection.support["amp"]


@pytest.fixture
def convolutions(tmp_path):
    model = tmp_path / "model.py"
    model.write_text(CONVOLUTIONS)
    return model


def test_emulated_types_are_optional_with_the_measured_rates(avx2, tmp_path):
    calibration, support = inspected(MODELS / "tiny.py", tmp_path)
    assert calibration.gain("matmul", "bf16") < 0.5
    assert support.choices == ("off",)
    assert set(support.optional) <= {"bf16", "fp16"} and "bf16" in support.optional
    assert "times slower" in support.reason and "GFLOP/s" in support.reason


def test_convolutions_in_an_emulated_type_are_not_even_tried(avx2, convolutions, tmp_path):
    calibration, support = inspected(convolutions, tmp_path)
    assert calibration.gain("convolution", "fp16") < 0.5
    assert support.choices == ("off",)
    assert "fp16" not in support.optional
    assert "convolutions" in support.reason


@pytest.mark.arithmetic
@needs_bf16_arithmetic
@pytest.mark.parametrize("fork", [True, False], ids=["forked", "in a new interpreter"])
def test_what_was_measured_to_gain_is_offered_and_nothing_else(convolutions, tmp_path, fork):
    calibration, support = inspected(convolutions, tmp_path, fork=fork)
    for amp in ("bf16", "fp16"):
        gains = [calibration.gain(work, amp) for work in ("matmul", "convolution")]
        if min(gains) > 1:
            assert amp in support.choices
        if max(gains) < 0.9:  # a processor may have the instructions, and be slower with them
            assert amp not in support.choices and amp in support.reason
