"""What lives at the peak, and whose it is, against what torch's CPU allocator really held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.prediction.anatomy import anatomies
from autotune.records.config import World
from autotune.records.explanation import BACKWARD, BATCH, FORWARD, LOSS, MODEL, STEP, UPDATE, Anatomy
from autotune.task import Task, load_task
from autotune.techniques import find_techniques
from tests.prediction.real_memory import real_peak_bytes

complete = find_techniques().complete

MODELS = Path(__file__).parent / "models"


def anatomy(task: Task, choices: dict[str, object], target: str = "cpu") -> Anatomy:
    (found,) = anatomies(task, [complete(choices, global_batch=task.global_batch)], target, find_techniques())
    assert isinstance(found, Anatomy), found
    return found


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("transformer", {"batch_size": 4, "checkpoint_segments": 2}),
        ("unet", {"batch_size": 2}),
        ("recurrent", {"batch_size": 32, "optimizer_in_backward": True}),
    ],
)
def test_modules_and_kinds_sum_to_the_real_peak(kind: str, choices: dict[str, object]) -> None:
    task = load_task(MODELS / f"{kind}.py")
    found = anatomy(task, choices)
    real = real_peak_bytes(task, complete(choices, global_batch=task.global_batch))
    assert sum(module.total_bytes for module in found.modules) == found.peak_bytes == pytest.approx(real, rel=0.05)
    names = {name for name, _ in task.build_model().named_modules()} | {MODEL, BATCH, LOSS, UPDATE}
    assert {module.name for module in found.modules} <= names


def test_what_is_made_in_the_backward_pass_is_the_modules_that_it_belongs_to() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Linear(16, 16)
            self.wide = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 16))

        def forward(self, x):
            return self.wide(self.narrow(x))

    task = Task(build_model=Model, make_batch=lambda n: (torch.randn(n, 16), torch.randn(n, 16)))
    found = anatomy(task, {"batch_size": 64})
    by_name = {module.name: module for module in found.modules}
    assert (found.phase, found.last_layer) == (BACKWARD, "wide.2")
    of_linear = 2 * 64 * 16 * 4096
    assert by_name["wide.0"].flops == {FORWARD: of_linear, BACKWARD: 2 * of_linear}
    assert by_name["wide.2"].held_bytes["gradients"] == 4 * (4096 * 16 + 16)
    assert by_name["wide.2"].held_bytes["temporaries"] >= 4 * 64 * 4096  # the gradient of what it was given
    assert by_name[BATCH].held_bytes == {"batch": 2 * 4 * 64 * 16}
    assert {moment.phase for moment in found.timeline} == {FORWARD, BACKWARD, STEP}


def test_on_a_gpu_the_copy_of_the_batch_counts_and_the_allocator_is_simulated() -> None:
    found = anatomy(load_task(MODELS / "transformer.py"), {"batch_size": 4}, "cuda")
    assert found.kinds()["batch"] > 0
    assert found.reserved_bytes % 2**21 == 0 and found.reserved_bytes > found.peak_bytes


def test_a_rank_holds_its_shards_and_what_goes_over_the_wire_is_told() -> None:
    task, techniques = load_task(MODELS / "transformer.py"), find_techniques()
    configs = [complete({"batch_size": 4, "accumulation_steps": 2, "parallel": kind}) for kind in ("ddp", "fsdp")]
    ddp, fsdp = anatomies(task, configs, "cpu", techniques, world=World(size=2))
    assert isinstance(ddp, Anatomy) and isinstance(fsdp, Anatomy), (ddp, fsdp)
    assert fsdp.kinds()["optimizer"] == pytest.approx(ddp.kinds()["optimizer"] / 2, rel=0.02)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in task.model().parameters())
    assert ddp.wire_bytes["all-reduce"] == pytest.approx(whole, rel=0.001)  # once in a step
    assert fsdp.wire_bytes["reduce-scatter"] == pytest.approx(whole, rel=0.02)
    assert (
        fsdp.wire_bytes["all-gather"] > 2 * fsdp.wire_bytes["reduce-scatter"]
    )  # in each micro batch, forward and backward
