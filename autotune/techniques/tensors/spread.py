"""How a model is spread over the processes of a world: copies whose gradients are averaged, or shards that are gathered when used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from autotune.randomness import keep_randomness
from autotune.task.batches import to_device
from autotune.techniques.build import Build, Spread


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


def copies(build: Build) -> Spread:
    """A copy of the model in each process, whose gradients are averaged in buckets: `DistributedDataParallel`.

    Its keyword arguments are `build.ddp_options`. Parameters that the loss does not reach are looked for once, on two samples:
    DDP waits for every gradient unless it is told to look for itself at each step, which takes time.
    """
    around = Around(build.model)
    found = next(unreached(build), None) is not None
    # parameters are equal by now: it would send them once more
    ddp = nn.parallel.DistributedDataParallel(
        around, find_unused_parameters=found, init_sync=False, **build.ddp_options
    )
    return Spread(ddp, lambda is_last: nullcontext() if is_last else ddp.no_sync(), gathers=False)


def shards(build: Build, blocks: Sequence[nn.Module], *, mesh: Any, reshard: bool, **options: Any) -> Spread:
    """A shard of each parameter in each process: FSDP2's `fully_shard` of each block, and of what is left.

    Args:
        blocks: what is gathered at a time.
        mesh: the processes: one dimension to shard over, or copies of shards.
        reshard: free what was gathered after the forward pass, and gather it again for the backward pass. It is said of the
            root, too, of which torch would decide otherwise.
        options: further ones of `fully_shard`.
    """
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **options)
    around: Any = fully_shard(Around(build.model), mesh=mesh, reshard_after_forward=reshard, **options)

    def synchronizing(is_last: bool) -> AbstractContextManager[Any]:
        around.set_requires_gradient_sync(is_last)
        return nullcontext()

    return Spread(around, synchronizing, gathers=True)


def unreached(build: Build) -> Iterator[nn.Parameter]:
    """Parameters that are trained and that a loss over two samples does not depend on."""
    with keep_randomness(build.device.torch_device):
        buffers = [(buffer, buffer.clone()) for buffer in build.model.buffers()]
        batch = to_device(build.task.small_batch(2), build.device.torch_device)
        for transform in build.batch_transforms:
            batch = transform(batch)
        loss = build.task.loss(build.model, batch)
        reached = set(_leaves(loss.grad_fn))
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    yield from (p for p in build.model.parameters() if p.requires_grad and id(p) not in reached)


def _leaves(node: Any) -> Iterator[int]:
    """The ids of the tensors whose gradients a graph comes to."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            yield id(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
