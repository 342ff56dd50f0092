"""A probe's process has the threads and the settings of torch that the script has which built its task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autotune.devices.cpu import THREAD_VARIABLES
from autotune.records.config import ProbeSettings
from autotune.runners.local import LocalRunner
from autotune.task import Task
from autotune.task.process_settings import apply_settings, read_settings
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.room import limit_bytes

SETTINGS = ProbeSettings(memory_limit_bytes=limit_bytes(800), max_timed_s=0.1, max_warmup_s=0.1, timeout_s=30)
MODEL = """
import json
import pathlib

import torch


def build_model():
    return torch.nn.Linear(4, 4)


def make_batch(size):
    return torch.randn(size, 4), torch.randn(size, 4)


def training_step(model, batch):
    seen = [torch.get_num_threads(), torch.get_float32_matmul_precision()]
    pathlib.Path("{folder}/seen.json").write_text(json.dumps(seen))
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.fixture(autouse=True)
def _a_script_that_told_torch_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread and rounded products, of which the environment knows nothing."""
    for variable in THREAD_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    before, num_threads = read_settings(), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_num_threads(num_threads)
    apply_settings(before)


def probe(source: TaskSource, folder: Path) -> None:
    with LocalRunner(source, device="cpu", logs=folder / "logs") as runner:
        outcome = runner.probe(find_techniques().complete({"batch_size": 4}), SETTINGS)
    assert outcome.ok, outcome


def test_a_task_built_in_python_is_probed_as_its_script_has_set_torch(tmp_path: Path) -> None:
    def checked(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen = torch.get_num_threads(), torch.get_float32_matmul_precision()
        if seen != (1, "high"):
            raise ValueError(f"a probe has {seen}")
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    task = Task(
        build_model=lambda: torch.nn.Linear(4, 4), make_batch=lambda size: torch.ones(size, 4), training_step=checked
    )
    probe(TaskSource.of(task), tmp_path)


def test_a_model_file_is_probed_as_it_is_run_by_itself(tmp_path: Path) -> None:
    """Whatever else has set torch in the process that searches."""
    (tmp_path / "model.py").write_text(MODEL.format(folder=tmp_path))
    probe(TaskSource.of(tmp_path / "model.py"), tmp_path)
    threads, precision = json.loads((tmp_path / "seen.json").read_text())
    assert precision == "highest" and threads == _threads_by_default()


def _threads_by_default() -> int:
    """Of a process whose environment says nothing: one for each core."""
    from autotune.devices.cpu import _num_physical_cores

    return _num_physical_cores()
