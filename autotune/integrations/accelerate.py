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
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from autotune.devices.torch_errors import is_out_of_memory
from autotune.errors import ConfigError, TaskError
from autotune.export.base import words_of
from autotune.group import launched_world
from autotune.integrations.base import name_of, read, search, techniques_saying
from autotune.records.check import Coupling
from autotune.records.config import ACCUMULATION, BATCH_SIZE, BatchPlan, Choice, largest_batch_size
from autotune.report.live import listeners_of
from autotune.task import Task, load_task
from autotune.techniques import Phase, find_techniques
from autotune.techniques.frameworks import ACCELERATE, DATALOADER
from autotune.tuning.events import Listener, Listeners

T = TypeVar("T")
# strategy of FSDP1, over the processes of one machine -> whether FSDP2 would reshard after the forward pass
_RESHARDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "_HYBRID_SHARD_ZERO2": False}
_PRECISION = "mixed_precision"
# sizes of groups of processes, as `ParallelismConfig` has them -> what such a group shares out, other than samples and parameters
_GROUPS = {
    "dp_replicate_size": "",
    "dp_shard_size": "",
    "tp_size": "tensors",
    "cp_size": "sequences",
    "sp_size": "sequences",
}


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
        return said if _plugin() is None else {name: value for name, value in said.items() if name != _PRECISION}

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
    memory all the same, it is called again with micro batches half as large, and more of them a step; not so where the search
    has found that they learn something else, or where several processes train together.

    The baseline's precision, compilation and sharding are those of `accelerate launch`, where that started the script. What an
    `Accelerator` that exists already when the search begins was made with holds for every later one of the process: it is kept.
    What each `Accelerator` is given for itself cannot be seen from here: state options of DDP (`kwargs_handlers`) as the task's
    `baseline`, `{"bucket_mb": 100}` say, and leave `split_batches` out, since the config's batch size is one process's.

    Args:
        task: what the function trains, or a function that makes it, or a model file.
        listeners: watch the search; by default its progress goes to stderr.
        **options: of `autotune.search`, such as `budget` and `include`.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        found: list[Executable] = []
        couplings: list[Coupling | None] = []

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> T:
            if not found:
                given = task if isinstance(task, Task) else load_task(task) if isinstance(task, str | Path) else task()
                watched_by = listeners_of([] if launched_world().rank else listeners)
                given, asked = _as_today(given, options, watched_by)
                result = search(given, (ACCELERATE, DATALOADER), asked, watched_by)
                found.append(Executable(result.config))
                couplings.append(result.subject.coupling)
            while True:
                try:
                    return function(found[0], *args, **kwargs)
                except Exception as error:
                    if not is_out_of_memory(error) or found[0][BATCH_SIZE] == 1:
                        raise
                    if launched_world().size > 1:
                        error.add_note(
                            "it is not called again with smaller micro batches: the other processes are in the same step"
                        )
                        raise
                    if couplings[0] is not None and not couplings[0].may_be_cut:
                        error.add_note(f"it is not called again with smaller micro batches: {couplings[0].reason}")
                        raise
                found[0] = _halve(found[0])
                gc.collect()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()

        return run

    if callable(task) and not isinstance(task, Task) and getattr(task, "__code__", None) and task.__code__.co_argcount:
        raise ConfigError(
            f"find_executable_config was put on {task.__name__} without a task; write @find_executable_config(task)"
        )
    return decorate


def choices_of_accelerator() -> dict[str, Choice]:
    """What the `Accelerator` that exists already does to every loop of this process; nothing where there is none."""
    if (state := _state()) is None:
        return {}
    spread = state.distributed_type.value
    if spread not in ("NO", "FSDP") and not spread.startswith("MULTI_"):
        raise _not_in_probes(spread)
    require_whole_samples(groups_of(state))
    if state.num_processes != (size := launched_world().size):
        raise TaskError(
            f"{size} processes were launched, and the Accelerator of each trains among {state.num_processes}; on the CPU they train "
            "together by Accelerator(cpu=True)"
        )
    backend = getattr(state.dynamo_plugin, "backend", None)
    return _read({_PRECISION: state.mixed_precision, "dynamo_backend": backend and backend.value})


def _not_in_probes(spread: str) -> TaskError:
    return TaskError(
        f"the Accelerator trains with {spread}, which probes do not; tune the script with FSDP, or with copies of the model "
        "(`accelerate launch --multi_gpu`)"
    )


def groups_of(state: Any) -> dict[str, int]:
    """The sizes of groups of processes in an `AcceleratorState`, by their names in `ParallelismConfig`; nothing where it has none."""
    config = getattr(state, "parallelism_config", None)  # older versions have none
    return {} if config is None else {name: getattr(config, name, 1) for name in _GROUPS}


def require_whole_samples(groups: Mapping[str, int]) -> None:
    """Raise TaskError where a group of processes shares out the tensors or the sequences of its samples."""
    for name, size in groups.items():
        if size > 1 and (what := _GROUPS[name]):
            raise TaskError(
                f"Accelerate's processes share out {what} ({name}={size}), which probes do not: each of theirs has samples of its own; "
                f"tune the script with {name}=1 first, or measure it as it is by `autotune search --command`"
            )


def device_of_this_process() -> str | None:
    """Where the `Accelerator` that exists already puts models; None where there is none."""
    state = _state()
    return None if state is None else name_of(state.device)


def _state() -> Any:
    """What every `Accelerator` of this process shares, once there is one; else None."""
    if "accelerate" not in sys.modules:
        return None
    from accelerate.state import AcceleratorState, is_initialized

    return AcceleratorState() if is_initialized() else None


def choices_of_launcher() -> dict[str, Choice]:
    """What `accelerate launch` hands over to the `Accelerator` of this process."""
    for spread in ("DEEPSPEED", "MEGATRON_LM"):
        if _is_set(f"USE_{spread}"):
            raise _not_in_probes(spread)
    require_whole_samples(_groups())
    return _read({name: os.environ.get(f"ACCELERATE_{name.upper()}") for name in (_PRECISION, "dynamo_backend")})


def _is_set(name: str) -> bool:
    """Whether the launcher has switched something on."""
    return os.environ.get(f"ACCELERATE_{name}", "").lower() == "true"


def _groups() -> dict[str, int]:
    """The sizes of groups of processes in this process, or as the launcher says."""
    if (state := _state()) is not None:
        return groups_of(state)
    if not _is_set("USE_PARALLELISM_CONFIG"):
        return {}
    return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", 1)) for name in _GROUPS}


def _plugin() -> Any:
    """By which Accelerate shards in this process, or will as the launcher says: its settings of FSDP; None where it does not.

    One process shards nothing: what is left of FSDP there is its precision, which is read as any.
    """
    if launched_world().size == 1:
        return None
    if (state := _state()) is not None:
        return state.fsdp_plugin if state.distributed_type.value == "FSDP" else None
    if not (_is_set("USE_FSDP") and torch.cuda.is_available()):  # a CPU trains copies
        return None
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin()  # as the environment says


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
    if _plugin() is not None:
        options = {**options, "exclude": (*options.get("exclude", ()), *techniques_saying(ACCELERATE, _PRECISION))}
    return replace(task, baseline={**choices_of_launcher(), **(task.baseline or {})} or None), dict(options)


def _read(said: Mapping[str, str | None]) -> dict[str, Choice]:
    """The choices that arguments of `Accelerator` make, and its plugin for FSDP."""
    given = {name: value.lower() for name, value in said.items() if value}
    plugin = _plugin()
    return read(ACCELERATE, given) if plugin is None else choices_of_shards(plugin, given, _groups())


def choices_of_shards(plugin: Any, given: Mapping[str, Any], groups: Mapping[str, int]) -> dict[str, Choice]:
    """The choices that Accelerate's settings of FSDP make beside other arguments, whose precision is that of what is sharded.

    Args:
        groups: sizes of groups of processes, as of `groups_of`: where there are copies of shards (HSDP), a group shares one out.

    Raises:
        TaskError: probes do not shard in this way.
    """
    reshards, strategy = plugin.reshard_after_forward, ""
    if plugin.fsdp_version == 1:
        strategy = (plugin.sharding_strategy or reshards).name
        reshards = _RESHARDS.get(strategy)
    copied = {"parallelism_config": groups} if groups.get("dp_replicate_size", 1) > 1 else {}
    if reshards is None or (copied and not reshards) or given.get(_PRECISION) == "fp16":
        kept = "" if reshards or not copied else ", in copies, not resharded"
        raise TaskError(
            f"Accelerate trains with FSDP ({strategy or 'version 2'}{kept}, {given.get(_PRECISION)}), which probes do not; expected one "
            "that shards, in fp32 or bf16, and reshards where there are copies: `--fsdp_sharding_strategy FULL_SHARD --mixed_precision "
            "bf16`, or `--fsdp_version 2 --fsdp_reshard_after_forward true`, say"
        )
    offload = plugin.cpu_offload
    offloads = getattr(offload, "offload_params", "CPU" in type(offload).__name__)  # of FSDP1, of FSDP2
    shards = {"fsdp_version": 2, "reshard_after_forward": reshards, "cpu_offload": offloads}
    spread, found = find_techniques(), read(ACCELERATE, {**given, "fsdp_plugin": shards, **copied})
    found = {name: choice for name, choice in found.items() if name in spread and spread[name].phase is Phase.SPREAD}
    return {**read(ACCELERATE, {**given, _PRECISION: "no"}), **found}


def _halve(config: Executable) -> Executable:
    plan = BatchPlan(config[BATCH_SIZE], config[ACCUMULATION])
    size = largest_batch_size(plan.batch_size // 2, plan.samples_per_step)
    return Executable({**config, BATCH_SIZE: size, ACCUMULATION: plan.samples_per_step // size})
