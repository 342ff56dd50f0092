"""A task that is inspected without values is told of as one that is trained, at none of the cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.devices.cpu import CpuDevice
from autotune.devices.targets import AbsentGpu
from autotune.prediction.fakes import inspect_untrained
from autotune.probe.inspection import inspect_task
from autotune.records.device import DeviceInfo
from autotune.records.inspection import Inspection
from autotune.task import Task, load_task

GPU = DeviceInfo(name="cuda", model="a GPU", total_bytes=2**36, free_bytes=2**36, capability=(8, 0))
MODELS = Path(__file__).parent / "models"
MEASURED = ("outside_bytes", "step_s", "device")  # differ from one inspection to the next


def untrained(task: Task, device: Any = None) -> dict[str, Any]:
    return inspect_untrained(task, device=device or CpuDevice(), host_bytes=2**30, memory_limit_bytes=None)


@pytest.mark.parametrize("name", ["transformer", "residual", "padded_recurrent", "partly_frozen"])
def test_what_applies_to_a_task_is_found_as_if_it_were_trained(name: str) -> None:
    task = load_task(MODELS / f"{name}.py")
    found, trained = untrained(task), inspect_task(task, device="cpu", memory_limit_bytes=None)
    assert {key: found[key] for key in trained if key not in MEASURED} == {
        key: trained[key] for key in trained if key not in MEASURED
    }
    assert (found["step_s"], found["built_for_real"]) == (None, "")
    assert Inspection.from_dict(json.loads(json.dumps(found))).support


def test_a_model_of_a_trillion_parameters_is_inspected_for_a_gpu() -> None:
    task = Task(
        build_model=lambda: nn.Sequential(*(nn.Linear(2**18, 2**18) for _ in range(16))),
        make_batch=lambda n: (torch.randn(n, 2**18), torch.randn(n, 2**18)),
    )
    found = untrained(task, AbsentGpu(GPU))
    assert found["facts"]["num_parameters"] == 16 * (2**36 + 2**18)
    assert "bf16" in found["support"]["amp"]["choices"]


def test_where_two_samples_are_no_batch_it_is_the_baselines() -> None:
    def make_batch(n: int) -> Any:
        if n % 8:
            raise ValueError("samples come in eights")
        return torch.randn(n, 4), torch.randn(n, 4)

    task = Task(build_model=lambda: nn.Linear(4, 4), make_batch=make_batch, baseline={"batch_size": 16})
    assert untrained(task)["step_samples"] == 16
