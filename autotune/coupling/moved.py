"""Finds what a training pass changes beside what is trained: a moving average of the weights, a queue of samples, a count.

The user's own loop changes it once for a batch, so that a step which accumulates changes it once for every micro batch.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from autotune.coupling.buffers import Counters, version_of
from autotune.randomness import RandomState, keep_randomness
from autotune.task import Task
from autotune.task.adapters import uncounted
from autotune.task.batches import fresh_copy, strided_parts
from autotune.task.held import Place, tensors_held_by

# elements of each larger tensor that are looked at: a change by `tensor.data` leaves its version as it is
NUM_ELEMENTS = 64
MOST_BYTES = 2**22  # of a tensor of which all values are compared
MOST_OUTSIDE = 256  # tensors outside the model that are looked at, nearest first: a task may hold its data, and a GPU is waited for


def moved_by_passes(task: Task, model: torch.nn.Module, batch: Any) -> str:
    """What each forward pass changes, in words; empty where it changes nothing, and where that cannot be found out.

    Two passes are alike in their batch and random numbers. The first may set something up, so the second one tells.

    Args:
        model: on its device, in training mode. It stays as the passes leave it; random states stay as they are.
        batch: on that device.
    """
    device = next(model.parameters()).device
    with contextlib.suppress(Exception), keep_randomness(device), uncounted(model):
        random = RandomState(device)
        task.loss(model, fresh_copy(batch))
        inside = {path: _Seen(tensor) for path, tensor in _inside(model)}
        outside = {place: _Seen(tensor) for place, _, tensor in _outside(task, model)}
        counters = Counters(model)
        random.restore()
        task.loss(model, fresh_copy(batch))
        for path, tensor in _inside(model):
            if path in inside and inside[path].differs_from(tensor):
                return path
        for place, what, tensor in _outside(task, model):
            if place in outside and outside[place].differs_from(tensor):
                return f"{what} outside the model"
        return counters.changed()
    return ""


def _inside(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's frozen parameters, and its buffers but for those of torch's own modules, and of classes derived from its
    normalisations, which are statistics of what they see.
    """
    for path, module in model.named_modules():
        if not (type(module).__module__.startswith("torch.") or isinstance(module, _NormBase)):
            yield from module.named_buffers(path, recurse=False)
        for name, parameter in module.named_parameters(path, recurse=False):
            if not parameter.requires_grad:
                yield name, parameter


def _outside(task: Task, model: torch.nn.Module) -> Iterator[tuple[Place, str, torch.Tensor]]:
    """The tensors that the user's code holds beside those of the model, each with its place and in words.

    What a pass has computed with a gradient is an activation that is kept to be looked at, and carries nothing into the next pass.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held = (
        (place, f"a {kind}" if kind else f"a tensor of shape {tuple(tensor.shape)}", tensor)
        for place, kind, tensor in tensors_held_by(task.training_step, model)
        if id(tensor) not in own and tensor.grad_fn is None
    )
    return itertools.islice(held, MOST_OUTSIDE)


class _Seen:
    """A tensor as it was after the first pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # held, so that no other one gets its identity
        self._values, all_known = _values_of(tensor)
        # a teacher that is still equal to what it follows is written to with the same values; so is scratch memory, but as a buffer
        self._by_writes = isinstance(tensor, torch.nn.Parameter) or not all_known
        self._written = _written(tensor)

    def differs_from(self, now: torch.Tensor) -> bool:
        """Whether a tensor, which is this one or stands in its place, has other values.

        Of a parameter, and where not all values are known, also whether torch saw this one change or its memory is elsewhere.
        """
        values, _ = _values_of(now)
        if len(values) != len(self._values) or not all(map(torch.equal, values, self._values)):
            return True
        return self._by_writes and now is self._tensor and _written(now) != self._written


def _values_of(tensor: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
    """The values of a tensor's parts, as bytes on the CPU, since NaN is not equal to itself; and whether these are all of them."""
    parts = [] if tensor.is_nested else strided_parts(tensor.detach())
    values = [part if part.nbytes <= MOST_BYTES else _few_of(part) for part in parts]
    all_known = not tensor.is_nested and all(map(operator.is_, values, parts))
    return [part.to("cpu", copy=True).reshape(-1).view(torch.uint8) for part in values], all_known


def _few_of(tensor: torch.Tensor) -> torch.Tensor:
    spread = torch.arange(NUM_ELEMENTS, device=tensor.device) * (tensor.numel() - 1) // (NUM_ELEMENTS - 1)
    return tensor[torch.unravel_index(spread, tensor.shape)]


def _written(tensor: torch.Tensor) -> tuple[int | None, list[int]]:
    """What changes where a tensor is written to as torch sees it, or gets other memory."""
    return version_of(tensor), [] if tensor.is_nested else [part.data_ptr() for part in strided_parts(tensor)]
