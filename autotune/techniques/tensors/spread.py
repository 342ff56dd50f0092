"""How a model is spread over the processes of a world: copies whose gradients are averaged, or shards that are gathered when used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from autotune.group import Together
from autotune.task.batches import own_elements, strided_parts
from autotune.techniques.build import Build, Spread

if TYPE_CHECKING:
    from autotune.devices.base import Device


class Around(nn.Module):
    """A module around the model, whose forward is whatever is done with it.

    What torch hooks to a forward pass (DDP's and FSDP2's collectives) is hooked here, so that it is there whichever methods of
    the model a loss calls. The model itself stays as it is, its class, its names and its state dict included.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """`function(model, batch)`."""
        return function(self.model, batch)


def start_equal(model: nn.Module) -> None:
    """Give every process the parameters and buffers of the first."""
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            for part in strided_parts(tensor.detach()):
                take_values_of_first(part)


def take_values_of_first(tensor: torch.Tensor) -> None:
    """Give every process the first one's values of a strided tensor. Without gradient."""
    own = tensor[own_elements(tensor)]
    distributed.broadcast(dense := own.contiguous(), 0)  # the group takes dense tensors alone
    own.copy_(dense)


def copies_of(build: Build) -> Spread:
    """A copy of the model in each process; the keyword arguments are `build.ddp_options`.

    Whether the loss leaves parameters out is found out once: DDP waits for every gradient unless it is told to look for them at
    each step, which takes time.
    """
    found = {
        "find_unused_parameters": Together(build.world, build.device.torch_device).largest(leaves_some_out(build)) > 0
    }
    build.places["parallel"] = found
    return copies(build.model, **found, **build.ddp_options)


def copies(model: nn.Module, **options: Any) -> Spread:
    """A copy of the model in each process, whose gradients are averaged in buckets: `DistributedDataParallel`, with its options."""
    # parameters are equal by now: it would send them once more
    ddp = nn.parallel.DistributedDataParallel(Around(model), init_sync=False, **options)
    return Spread(ddp, lambda is_last: nullcontext() if is_last else ddp.no_sync(), gathers=False)


def mesh_over(device_type: str, size: int, number: int) -> Any:
    """The processes in groups of `number` that share parameters out; where there are several, they hold copies of each other."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (size,) if number == size else (size // number, number)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def meet(device: Device, mesh: Any) -> None:
    """Let each dimension of a mesh that is a group of its own hold its first collective now, where that takes memory of the device.

    Else the first step would, in its midst.
    """
    if mesh.ndim == 1 or not device.capabilities.communicator_bytes:
        return
    with device.count_communicators(mesh.ndim):
        for group in mesh.get_all_groups():
            distributed.all_reduce(torch.zeros(1, device=device.torch_device), group=group)


def shards(model: nn.Module, blocks: Sequence[nn.Module], *, mesh: Any, reshard: bool, **options: Any) -> Spread:
    """A shard of each parameter in each process: FSDP2's `fully_shard` of each block, and of what is left.

    Args:
        blocks: what is gathered at a time.
        mesh: the processes: one dimension to shard over, or copies of shards.
        reshard: free what was gathered after the forward pass, and gather it again for the backward pass. It is said of the
            root, too, of which torch would decide otherwise.
        options: further ones of `fully_shard`.
    """
    from torch.distributed.fsdp import fully_shard

    around: Any = Around(model)
    for module in (*blocks, around):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, **options)

    def synchronizing(is_last: bool) -> AbstractContextManager[Any]:
        around.set_requires_gradient_sync(is_last)
        return nullcontext()

    return Spread(around, synchronizing, gathers=True)


def leaves_some_out(build: Build) -> bool:
    """Whether the loss does not reach all parameters that are trained, in this process.

    It is found out by one micro step, as training takes it, of which nothing is left.
    """
    trained = [parameter for parameter in build.model.parameters() if parameter.requires_grad]
    with build.tried_loss(build.task.batch(build.config.batch_size)) as loss:
        loss.backward()
    leaves_out = any(parameter.grad is None for parameter in trained)
    for parameter in trained:
        parameter.grad = None
    return leaves_out
