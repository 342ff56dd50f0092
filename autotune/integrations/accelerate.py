"""Accelerate: a decorator where `accelerate.utils.find_executable_batch_size` stands, whose function receives the config.

```python
@find_executable_config(lambda: autotune.Task.from_loader(make_model(), make_loader(), loss), budget="2m")
def train(config):
    accelerator = Accelerator(**config.accelerator)
    loader = DataLoader(dataset, shuffle=True, **config.dataloader)
```
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune import techniques
from autotune.devices.oom import is_out_of_memory
from autotune.errors import ConfigError
from autotune.integrations.words import search
from autotune.records.batch_plan import ACCUMULATION, BATCH_KEYS, BATCH_SIZE, BatchPlan, largest_batch_size
from autotune.task import Task, load_task
from autotune.techniques.frameworks import ACCELERATE, BATCH, DATALOADER
from autotune.tuning.events import Listener

T = TypeVar("T")


class Executable(dict[str, Any]):
    """A config dict that also says itself in the words of Accelerate.

    Attributes:
        accelerator: arguments of `Accelerator`.
        dataloader: arguments of `DataLoader`.
    """

    @property
    def accelerator(self) -> dict[str, Any]:
        """Arguments of `Accelerator`: precision, accumulation, compilation."""
        return self._said(ACCELERATE)

    @property
    def dataloader(self) -> dict[str, Any]:
        """Arguments of `DataLoader`: batch size and loading."""
        return self._said(DATALOADER)

    def _said(self, framework: str) -> dict[str, Any]:
        said: dict[str, Any] = {}
        for name, choice in self.items():
            if name in BATCH_KEYS:
                said |= BATCH[name][framework].write(choice) if framework in BATCH[name] else {}
            else:
                said |= techniques.REGISTRY[name].write(framework, choice) or {}
        return said


def find_executable_config(
    task: Task | str | Path | Callable[[], Task], *, listener: Listener | None = None, **options: Any
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a function that trains: its first argument becomes the config that trains `task` fastest on this machine.

    The search takes place when the function is first called. Searched is what Accelerate and `DataLoader` can say. The answer
    may accumulate, which takes a `with accelerator.accumulate(model):` around each micro batch. Should the function run out of
    memory all the same, it is called again with micro batches half as large, and more of them a step.

    Args:
        task: what the function trains, or a function that makes it, or a model file.
        listener: watches the search; by default its progress goes to stderr.
        **options: of `autotune.search`, such as `budget` and `include`.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        found: list[Executable] = []

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> T:
            if not found:
                given = task if isinstance(task, Task) else load_task(task) if isinstance(task, str | Path) else task()
                found.append(Executable(search(given, (ACCELERATE, DATALOADER), options, listener).config))
            while True:
                try:
                    return function(found[0], *args, **kwargs)
                except Exception as error:
                    if not is_out_of_memory(error) or found[0][BATCH_SIZE] == 1:
                        raise
                found[0] = _halved(found[0])
                gc.collect()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()

        return run

    if callable(task) and not isinstance(task, Task) and getattr(task, "__code__", None) and task.__code__.co_argcount:
        raise ConfigError(
            f"find_executable_config was put on {task.__name__} without a task; write @find_executable_config(task)"
        )
    return decorate


def _halved(config: Executable) -> Executable:
    plan = BatchPlan(config[BATCH_SIZE], config[ACCUMULATION])
    size = largest_batch_size(plan.batch_size // 2, plan.samples_per_step)
    return Executable({**config, BATCH_SIZE: size, ACCUMULATION: plan.samples_per_step // size})
