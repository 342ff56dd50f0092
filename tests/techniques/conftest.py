"""What the tests of techniques share: a `Setting` for any task, as the inspection of a task makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from autotune.devices import open_device
from autotune.records.config import Choice
from autotune.task import Task
from autotune.techniques import Setting, find_techniques

techniques = find_techniques()

torch.set_num_threads(1)


@pytest.fixture
def make_setting() -> Callable[..., Setting]:
    def make(task: Task, *, baseline: Mapping[str, Choice] | None = None, device: Any = "cpu") -> Setting:
        opened = open_device(device) if isinstance(device, str) else device
        model = task.model().to(opened.torch_device)
        dataset = task.dataset()
        return Setting(
            task=task,
            device=opened,
            model=model,
            optimizer=task.optimizer(model),
            batch=task.batch(2),
            baseline=techniques.complete(baseline or {}, global_batch=task.global_batch).as_dict(),
            dataset_size=len(dataset) if hasattr(dataset, "__len__") else None,
        )

    return make


@pytest.fixture
def make_task() -> Callable[..., Task]:
    """A task on 8 features and 4 classes around any model of that shape."""

    def make(build_model: Callable[[], torch.nn.Module], **changes: Any) -> Task:
        def make_batch(batch_size: int) -> Any:
            return torch.randn(batch_size, 8), torch.randint(0, 4, (batch_size,))

        return Task(build_model=build_model, **{"make_batch": make_batch, **changes})

    return make


@pytest.fixture
def skip_unsupported(make_setting: Callable[..., Setting]) -> Callable[[Task, Mapping[str, Choice]], None]:
    """Skips the test where this machine cannot train a task with a config."""

    def skip(task: Task, config: Mapping[str, Choice]) -> None:
        for technique in techniques.values():
            if technique.name in config:
                support = technique.support(make_setting(task))
                if config[technique.name] not in (*support.choices, *support.optional):
                    pytest.skip(support.reason)

    return skip
