"""What Accelerate does to the loops of this process: as its launcher says, and as the `Accelerator` that is there has it.

What holds for the whole process, such as the precision, all `Accelerator`s share. What each was given for itself, it alone knows:
`kwargs_handlers`, accumulation, `split_batches`.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from autotune.errors import TaskError
from autotune.group import launched_world
from autotune.integrations.base import name_of, read
from autotune.records.config import ACCUMULATION, BATCH_SIZE, Choice
from autotune.techniques import Phase, find_techniques
from autotune.techniques.frameworks import ACCELERATE

# strategy of FSDP1, over the processes of one machine -> whether FSDP2 would reshard after the forward pass
_RESHARDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "_HYBRID_SHARD_ZERO2": False}
PRECISION, _OF_DDP = "mixed_precision", "kwargs_handlers"
# sizes of groups of processes, as `ParallelismConfig` has them -> what such a group shares out, other than samples and parameters
_GROUPS = {
    "dp_replicate_size": "",
    "dp_shard_size": "",
    "tp_size": "tensors",
    "cp_size": "sequences",
    "sp_size": "sequences",
}


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
    return _read({PRECISION: state.mixed_precision, "dynamo_backend": backend and backend.value})


def choices_of_loop(samples: int) -> tuple[dict[str, Choice], tuple[str, ...]]:
    """What the `Accelerator` that exists already was given for its own loops alone, as `settings_of` tells it; nothing without one.

    Accelerate keeps no list of its `Accelerator`s; the interpreter's garbage collector does.

    Args:
        samples: the batch size of the loop's loader.

    Raises:
        TaskError: there are several with unlike settings, or `settings_of` refuses one.
    """
    if _state() is None:
        return {}, ()
    gc.collect()  # what is gone says nothing
    kind = sys.modules["accelerate"].Accelerator
    found = [settings_of(one, samples) for one in gc.get_objects() if issubclass(type(one), kind)]
    if any(one != found[0] for one in found):
        told = " and ".join(str(choices) for choices, _ in found)
        raise TaskError(
            f"{len(found)} Accelerators are there, with unlike settings of their own ({told}), and it is not known which of them trains "
            "the loop; make one, or give all the same"
        )
    return found[0] if found else ({}, ())


def settings_of(accelerator: Any, samples: int) -> tuple[dict[str, Choice], tuple[str, ...]]:
    """The choices that an `Accelerator` makes for its own loops alone, and what the user should know about probes of them.

    Args:
        samples: the batch size of a loader, which `split_batches` makes that of all processes.

    Raises:
        TaskError: probes do not train so.
    """
    size, found, told = launched_world().size, dict[str, Choice](), list[str]()
    if size > 1 and accelerator.split_batches:
        found[BATCH_SIZE] = max(1, samples // size)
    if (steps := accelerator.gradient_accumulation_steps) > 1:
        found[ACCUMULATION] = steps
        if size > 1 and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
            raise TaskError(
                "the Accelerator averages gradients in every micro batch (sync_each_batch), and probes do it once a step; leave "
                "sync_each_batch out of its GradientAccumulationPlugin, or measure the script by `autotune search --command`"
            )
    copies = fsdp_plugin() is None
    if copies and accelerator.autocast_handler is not None and not accelerator.autocast_handler.enabled:
        found |= read(ACCELERATE, {PRECISION: "no"})
    if copies and size > 1 and accelerator.ddp_handler is not None:
        found |= _options_of_ddp(accelerator.ddp_handler)
        told += _untold_of_ddp(accelerator.ddp_handler)
    if size > 1 and accelerator.dispatch_batches:
        told.append("each process of a probe loads its samples itself, and not the first for all (dispatch_batches)")
    return found, tuple(told)


def _options_of_ddp(handler: Any) -> dict[str, Choice]:
    """The choices that options of DDP make. Raises TaskError where it sends gradients in another form."""
    if handler.comm_hook.value != "no":
        raise TaskError(
            f"the Accelerator's DDP sends gradients by a hook (comm_hook={handler.comm_hook.name}), and that of probes as they are; leave "
            "comm_hook out of its DistributedDataParallelKwargs, or measure the script by `autotune search --command`"
        )
    return read(ACCELERATE, {_OF_DDP: handler.to_dict()})


def _untold_of_ddp(handler: Any) -> Iterator[str]:
    """What DDP does other than by default, and no technique says."""
    techniques = find_techniques().values()
    said = {name for each in techniques for name in (each.write(ACCELERATE, each.off) or {}).get(_OF_DDP, ())}
    for name, value in handler.to_kwargs().items():
        if name not in said:
            but = "only where the loss leaves parameters out" if name == "find_unused_parameters" else "not"
            yield f"the script's DDP has {name}={value}, and that of probes {but}"


@contextmanager
def watch_accelerators(see: Callable[[Any], None]) -> Iterator[None]:
    """A context in which each `Accelerator` that is made is shown to `see`, which may raise."""
    from accelerate import Accelerator

    make = Accelerator.__init__

    @functools.wraps(make)
    def make_and_show(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        see(self)

    with mock.patch.object(Accelerator, "__init__", make_and_show):
        yield


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


def device_of_launcher() -> str | None:
    """Where `accelerate launch` has an `Accelerator` put models: the CPU, or None where it says nothing."""
    from accelerate.utils import parse_flag_from_env

    return "cpu" if parse_flag_from_env("ACCELERATE_USE_CPU") else None


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
    return _read({name: os.environ.get(f"ACCELERATE_{name.upper()}") for name in (PRECISION, "dynamo_backend")})


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


def fsdp_plugin() -> Any:
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


def _read(said: Mapping[str, str | None]) -> dict[str, Choice]:
    """The choices that arguments of `Accelerator` make, and its plugin for FSDP."""
    given = {name: value.lower() for name, value in said.items() if value}
    if given.get(PRECISION) == "fp8":
        raise TaskError(
            "Accelerate trains in fp8, which probes do not; tune the script with --mixed_precision bf16 first, or measure it as it is by "
            "`autotune search --command`"
        )
    plugin = fsdp_plugin()
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
    if reshards is None or (copied and not reshards) or given.get(PRECISION) == "fp16":
        kept = "" if reshards or not copied else ", in copies, not resharded"
        raise TaskError(
            f"Accelerate trains with FSDP ({strategy or 'version 2'}{kept}, {given.get(PRECISION)}), which probes do not; expected one "
            "that shards, in fp32 or bf16, and reshards where there are copies: `--fsdp_sharding_strategy FULL_SHARD --mixed_precision "
            "bf16`, or `--fsdp_version 2 --fsdp_reshard_after_forward true`, say"
        )
    offload = plugin.cpu_offload
    offloads = getattr(offload, "offload_params", "CPU" in type(offload).__name__)  # of FSDP1, of FSDP2
    shards = {"fsdp_version": 2, "reshard_after_forward": reshards, "cpu_offload": offloads}
    spread, found = find_techniques(), read(ACCELERATE, {**given, "fsdp_plugin": shards, **copied})
    found = {name: choice for name, choice in found.items() if name in spread and spread[name].phase is Phase.SPREAD}
    return {**read(ACCELERATE, {**given, PRECISION: "no"}), **found}
