"""Several processes train one model: each holds a copy of it, or a shard."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config, World, divisors
from autotune.techniques import Build, Expectation, Factor, Setting, UnsupportedError
from autotune.techniques.block_chains import blocks_of
from autotune.techniques.frameworks import ACCELERATE, TORCH, At, Table, merge, words
from autotune.techniques.spread_option import SpreadTechnique, shards_parameters

if TYPE_CHECKING:
    from autotune.task import Task

_HYBRID = re.compile(r"hsdp:([1-9]\d*)")
DDP, ZERO1, FSDP, FSDP_GRAD = "ddp", "zero1", "fsdp", "fsdp_grad"
# as Accelerate calls the processes that share parameters out, and how many they are
_GROUPS, _SIZE = "parallelism_config", "dp_shard_size"
_SHARDS = """
blocks=[model.get_submodule(name) for name in {{modules}}],
mesh=mesh_over(DEVICE.type, WORLD_SIZE, {number}),
reshard={reshard}
""".strip()


class Parallel(SpreadTechnique):
    """DDP, and what shards on top of it or in its place. In a world of one process every choice but `ddp` is refused.

    `zero1` is DDP with the optimizer's state sharded by whole parameters (`ZeroRedundancyOptimizer`, Rajbhandari et al. 2020).
    `fsdp` shards parameters, gradients and state by FSDP2, block by block of the chain that checkpointing finds; `fsdp_grad`
    keeps what was gathered until the backward pass; `hsdp:N` shards over groups of N processes, which hold copies of each other.
    """

    name = "parallel"
    summary = "several processes hold copies of the model, or shards of its optimizer state, gradients, parameters"
    listed_choices = "`ddp` `zero1` `fsdp` `fsdp_grad` `hsdp:N`"
    applies = "several devices; shards of parameters: a chain of blocks"
    off = DDP
    order = 50  # after the options of DDP
    leanest = (FSDP, FSDP_GRAD, ZERO1)
    check_steps = 3
    frameworks = words(
        transformers=Table(
            {
                FSDP: {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}},
                FSDP_GRAD: {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": False}},
            }
        ),
        accelerate=Table(
            {
                FSDP: {"fsdp_plugin": {"fsdp_version": 2, "reshard_after_forward": True}},
                FSDP_GRAD: {"fsdp_plugin": {"fsdp_version": 2, "reshard_after_forward": False}},
            }
        ),
        deepspeed=Table(
            {
                choice: {"zero_optimization": {"stage": stage}}
                for stage, choice in enumerate((ZERO1, FSDP_GRAD, FSDP), 1)
            }
        ),
        torch=Table(
            {
                ZERO1: {At.OPTIMIZERS: "shard_state(optimizer)"},
                FSDP: {At.SPREAD: _SHARDS.format(number="WORLD_SIZE", reshard=True)},
                FSDP_GRAD: {At.SPREAD: _SHARDS.format(number="WORLD_SIZE", reshard=False)},
            }
        ),
    )

    def validate(self, choice: Any) -> Choice:
        if isinstance(choice, str) and (choice in (DDP, ZERO1, FSDP, FSDP_GRAD) or _HYBRID.fullmatch(choice)):
            return choice
        raise ValueError(f"expected one of {', '.join((DDP, ZERO1, FSDP, FSDP_GRAD))}, or hsdp:N")

    def label(self, choice: Choice) -> str:
        return str(choice)

    def write(
        self, framework: str, choice: Choice, choices: Sequence[Choice] = (), *, optimizer: str = ""
    ) -> dict[str, Any] | None:
        """What is said of `hsdp:N` is what is said of `fsdp`, with N."""
        hybrid = _HYBRID.fullmatch(str(choice))
        if hybrid is None:
            return super().write(framework, choice, choices, optimizer=optimizer)
        if framework == TORCH:
            return {At.SPREAD: _SHARDS.format(number=hybrid[1], reshard=True)}
        sharded = self.write(ACCELERATE, FSDP) or {}
        return merge(sharded, {_GROUPS: {_SIZE: int(hybrid[1])}}) if framework == ACCELERATE else None

    def read(self, framework: str, arguments: Mapping[str, Any], choices: Sequence[Choice] = ()) -> Choice | None:
        found = super().read(framework, arguments, choices)
        groups = arguments.get(_GROUPS)
        size = groups.get(_SIZE) if framework == ACCELERATE and isinstance(groups, Mapping) else None
        return f"hsdp:{size}" if found == FSDP and size else found

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """Adam's state is half of a parameter's 16 bytes; all of them are shared out by FSDP, and gathered again over the wire."""
        if choice == ZERO1:
            return Expectation(update=Factor(spread=1.3), state=Factor(typical=0.75, spread=1.2))
        return Expectation(compute=Factor(typical=1.1, spread=1.3), state=Factor(typical=0.5, spread=1.5))

    def choices_for(self, setting: Setting) -> tuple[Choice, ...]:
        """Those that shard the optimizer where it can be made anew, those that shard parameters where there are blocks."""
        choices = [DDP]
        if not _why_not_sharded(setting.optimizer):
            choices.append(ZERO1)
        choices += [FSDP, FSDP_GRAD]
        size = setting.world.size
        choices += [f"hsdp:{number}" for number in divisors(size) if 1 < number < size]
        return tuple(choices)

    def num_shards(self, choice: Choice, world: World) -> int:
        if hybrid := _HYBRID.fullmatch(str(choice)):
            return int(hybrid[1])
        return world.size if choice in (FSDP, FSDP_GRAD) else 1

    def num_groups(self, choice: Choice) -> int:
        """Of processes that share parameters out, and of those that hold copies of the same shards."""
        return 2 if _HYBRID.fullmatch(str(choice)) else 0

    def shapes_micro_batch(self, choice: Choice) -> bool:
        """What is sharded of the optimizer alone is not needed there."""
        return choice != ZERO1

    def conflict(self, config: Config) -> str:
        if config[self.name] != DDP and config["optimizer_state"] != "default":
            return "a shard of the state is not kept in another way: leave optimizer_state at its default"
        if shards_parameters(config) and config["channels_last"]:
            return "FSDP2 shards contiguous parameters alone: leave channels_last off"
        return ""

    def apply(self, build: Build, choice: Choice) -> None:
        if choice == ZERO1:
            build.optimizers.append(partial(_shard_state_of, build.model))
            return
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        from autotune.techniques.tensors.spread import meet, mesh_over, shards

        size = number = build.world.size
        if hybrid := _HYBRID.fullmatch(str(choice)):
            number = int(hybrid[1])
            if size % number:
                raise UnsupportedError(f"parallel={choice}: {size} processes make no groups of {number}")
        with unset_fake_temporarily():  # of a trace: a mesh reads the values of its tensor
            mesh = mesh_over(build.device.torch_device.type, size, number)
            meet(build.device, mesh)
        blocks = _blocks(build.task, build.model)
        classes = sorted({type(block).__name__ for block in blocks})  # by which frameworks know blocks
        build.acting_on(self.name, blocks)["classes"] = classes
        build.spread = shards(build.model, blocks, mesh=mesh, reshard=choice != FSDP_GRAD, **build.fsdp_options)


def _blocks(task: Task, model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The blocks of the chain, without those that share parameters with the rest of the model; none where there is no chain."""
    try:
        blocks = blocks_of(task, model).blocks
    except UnsupportedError:
        return ()
    held = _uses(model)
    return [block for block in blocks if (own := _uses(block)) and own.items() <= held.items()]


def _uses(module: torch.nn.Module) -> Counter[int]:
    """How often each parameter, by its id, stands in a module."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _shard_state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    from autotune.task.adapters import exchange_optimizer

    if reason := _why_not_sharded(optimizer):
        raise UnsupportedError(f"parallel={ZERO1}: {reason}")
    sharded = shard_state(optimizer)
    exchange_optimizer(model, optimizer, sharded)
    return sharded


def shard_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer, made anew with the hooks of the old one, with its state sharded over the processes.

    Each process updates whole parameters and sends them round.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    groups = [
        {name: value for name, value in group.items() if name == "params" or name in known}
        for group in optimizer.param_groups
    ]
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}
    sharded = ZeroRedundancyOptimizer(groups, optimizer_class=kind, **defaults)
    # steps are taken by this one, which has all parameters; what is saved and loaded is the state of its share
    kept = ((sharded, ("step",)), (sharded.optim, ("state_dict", "load_state_dict")))
    for owner, whats in kept:
        for name in (f"_optimizer_{what}_{when}_hooks" for what in whats for when in ("pre", "post")):
            setattr(owner, name, getattr(optimizer, name))
    return sharded


def _why_not_sharded(optimizer: Any) -> str:
    """Why an optimizer cannot be made anew over a share of its parameters; empty where it can."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not type(optimizer).__module__.startswith("torch.optim."):
        return (
            f"{type(optimizer).__name__} is not one of torch's own optimizers, and may not be made anew from its groups"
        )
    if optimizer.state:
        return "the optimizer has state already"
    return ""
