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
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune.devices.torch_errors import is_out_of_memory
from autotune.errors import ConfigError, TaskError
from autotune.export.base import ALIKE_THERE, counts_terms, words_of
from autotune.group import launched_world
from autotune.integrations.accelerator import (
    PRECISION,
    choices_of_accelerator,
    choices_of_launcher,
    device_of_launcher,
    device_of_this_process,
    fsdp_plugin,
    settings_of,
    watch_accelerators,
)
from autotune.integrations.base import listeners_here, search, techniques_saying
from autotune.records.config import ACCUMULATION, BATCH_KEYS, BATCH_SIZE, BatchPlan, describe_batch, largest_batch_size
from autotune.records.result import Result
from autotune.recovery import BATCH_STATISTICS
from autotune.task import Task, load_task
from autotune.techniques import Phase, find_techniques
from autotune.techniques.frameworks import ACCELERATE, DATALOADER
from autotune.tuning.events import Listener, Listeners

T = TypeVar("T")


class Executable(dict[str, Any]):
    """A config dict, also in the words of Accelerate. How the model is spread over processes is left to the launcher.

    Attributes:
        accelerator: arguments of `Accelerator`.
        dataloader: arguments of `DataLoader`.
    """

    @property
    def accelerator(self) -> dict[str, Any]:
        """Arguments of `Accelerator`: precision, accumulation, compilation. Where it shards, the launcher has given the precision."""
        said = self._said(ACCELERATE)
        return said if fsdp_plugin() is None else {name: value for name, value in said.items() if name != PRECISION}

    @property
    def dataloader(self) -> dict[str, Any]:
        """Arguments of `DataLoader`: batch size and loading."""
        return self._said(DATALOADER)

    def _said(self, framework: str) -> dict[str, Any]:
        said, techniques = dict[str, Any](), find_techniques()
        for name, choice in self.items():
            if name not in techniques or techniques[name].phase is not Phase.SPREAD:
                said |= words_of(techniques, framework, name, choice) or {}
        return said


def find_executable_config(
    task: Task | str | Path | Callable[[], Task], *, listeners: Sequence[Listener] | None = None, **options: Any
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a function that trains: its first argument becomes the config that trains `task` fastest on this machine.

    The search takes place when the function is first called. Searched is what Accelerate and `DataLoader` can say. The answer
    may accumulate, which takes a `with accelerator.accumulate(model):` around each micro batch. Should the function run out of
    memory all the same, a warning says so, and it is called again with micro batches half as large, and more of them a step. Not so
    where several processes train together, nor where they would learn something else (the loss couples samples, or the model has batch
    normalisation), unless `accumulation_steps` is included.

    The baseline's precision, compilation and sharding are those of `accelerate launch`, where that started the script. What an
    `Accelerator` that exists already when the search begins was made with holds for every later one of the process: it is kept.
    The search takes place on its device, or else on the CPU where the launcher says so. What the function gives its own `Accelerator`
    cannot be known when the search begins: give `device="cpu"` for its `cpu=True`, and state options of DDP (`kwargs_handlers`) as
    the task's `baseline`, `{"bucket_mb": 100}` say. When the `Accelerator` is made, others are warned of, and what would train other
    batches than the config says (`split_batches`, a `gradient_accumulation_plugin`) is refused.

    Args:
        task: what the function trains, or a function that makes it, or a model file.
        listeners: watch the search; by default its progress goes to stderr.
        **options: of `autotune.search`, such as `budget` and `include`.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        found: list[Executable] = []
        never: list[str] = []  # why its micro batches must not become smaller; empty where they may

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> T:
            watched_by = listeners_here(listeners)
            if not found:
                given = task if isinstance(task, Task) else load_task(task) if isinstance(task, str | Path) else task()
                given, asked = _as_today(given, options, watched_by)
                device = device_of_this_process() or device_of_launcher() or "auto"
                result = search(given, (ACCELERATE, DATALOADER), asked, watched_by, device=device)
                found.append(Executable(result.config))
                never.append(_why_whole(asked, result))
                if counts_terms(result):
                    Listeners(watched_by).warn(
                        f"the task's weights of micro batches are not Accelerate's: {ALIKE_THERE}"
                    )
            while True:
                try:
                    with watch_accelerators(functools.partial(_compare, found[0], watched_by)):
                        return function(found[0], *args, **kwargs)
                except Exception as error:
                    if not is_out_of_memory(error) or found[0][BATCH_SIZE] == 1:
                        raise
                    why = "the other processes are in the same step" if launched_world().size > 1 else never[0]
                    if why:
                        error.add_note(f"it is not called again with smaller micro batches: {why}")
                        raise
                found[0] = _halve(found[0])
                Listeners(watched_by).warn(
                    f"{_name_of(function)} ran out of memory: it is called again with {describe_batch(found[0])}"
                )
                gc.collect()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()

        return run

    if callable(task) and not isinstance(task, Task) and _needs_arguments(task):
        raise ConfigError(
            f"find_executable_config was put on {_name_of(task)} without a task; write @find_executable_config(task)"
        )
    return decorate


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", repr(function)))


def _needs_arguments(function: Callable[..., Any]) -> bool:
    """Whether it cannot be called without arguments: it trains, and makes no task."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # the arguments of what is not written in Python are not known
        pass
    return False


def _why_whole(options: Mapping[str, Any], result: Result) -> str:
    """Why smaller micro batches would learn something else; empty where they would not, or the user wants them all the same."""
    if ACCUMULATION in options.get("include", ()):
        return ""
    if (coupling := result.subject.coupling) is not None and not coupling.may_be_cut:
        return coupling.reason
    return BATCH_STATISTICS if result.subject.has_batchnorm else ""


def _as_today(task: Task, options: Mapping[str, Any], listeners: Sequence[Listener]) -> tuple[Task, dict[str, Any]]:
    """The task and the options of a search that begins with what Accelerate does today, and keeps what can no longer be changed."""
    if found := choices_of_accelerator():
        words = {name: choice for name, choice in found.items() if name not in options.get("exclude", ())}
        kept = " and ".join(f"{name}={choice}" for name, choice in words.items())
        text = (
            f"an Accelerator was there before the search: {kept} holds for all of this process, so nothing else is tried; "
            "make the Accelerator in the function that receives the config, and not for its task"
        )
        Listeners(listeners).warn(text)
        task = replace(task, baseline={**(task.baseline or {}), **found})
        return task, {**options, "fix": {**options.get("fix", {}), **words}}
    if fsdp_plugin() is not None:
        options = {**options, "exclude": (*options.get("exclude", ()), *techniques_saying(ACCELERATE, PRECISION))}
    return replace(task, baseline={**choices_of_launcher(), **(task.baseline or {})} or None), dict(options)


def _compare(config: Executable, listeners: Sequence[Listener], accelerator: Any) -> None:
    """Compare what an `Accelerator` was given for itself with the config that it is to train.

    Raises:
        TaskError: it trains other batches, or as no probe does.
    """
    choices, told = settings_of(accelerator, config[BATCH_SIZE])
    unlike = {name: choice for name, choice in choices.items() if config.get(name, choice) != choice}
    has, said = (", ".join(f"{name}={of[name]}" for name in unlike) for of in (choices, config))
    if not unlike.keys().isdisjoint(BATCH_KEYS):
        raise TaskError(
            f"the Accelerator trains with {has}, and the config is {said}; leave split_batches and gradient_accumulation_plugin out, and "
            "make it by Accelerator(**config.accelerator)"
        )
    if unlike:
        told = (*told, f"the Accelerator has {has}, and probes had {said}: state it as the task's baseline")
    for text in told:
        Listeners(listeners).warn(text)


def _halve(config: Executable) -> Executable:
    plan = BatchPlan(config[BATCH_SIZE], config[ACCUMULATION])
    size = largest_batch_size(plan.batch_size // 2, plan.samples_per_step)
    return Executable({**config, BATCH_SIZE: size, ACCUMULATION: plan.samples_per_step // size})
