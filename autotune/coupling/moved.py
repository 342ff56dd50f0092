"""Finds what a training pass changes beside what is trained: a moving average of the weights, a queue of samples, a count.

The user's own loop changes it once for a batch, so that a step which accumulates changes it once for every micro batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autotune.coupling.buffers import Counters, version_of
from autotune.randomness import RandomState, keep_randomness
from autotune.task import Task
from autotune.task.adapters import uncounted
from autotune.task.batches import fresh_copy
from autotune.task.held import tensors_held_by

NUM_ELEMENTS = 64  # of each tensor whose values are looked at: a change by `tensor.data` leaves its version as it is

_Mark = tuple[int, int | None, int | None, str]  # a tensor's identity, version and address, and some of its values


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
        inside, outside, counters = _inside(model), _outside(task, model), Counters(model)
        random.restore()
        task.loss(model, fresh_copy(batch))
        inside_now, outside_now = _inside(model), _outside(task, model)
        for path, mark in inside.items():
            if path in inside_now and _has_changed(mark, inside_now[path]):
                return path
        for number, (what, mark) in outside.items():
            if number in outside_now and _has_changed(mark, outside_now[number][1]):
                return f"{what} outside the model"
        return counters.changed()
    return ""


def _inside(model: torch.nn.Module) -> dict[str, _Mark]:
    """The model's frozen parameters, and its buffers but for those of torch's own modules, which are statistics of what they see."""

    def found() -> Iterator[tuple[str, torch.Tensor]]:
        for path, module in model.named_modules():
            if not type(module).__module__.startswith("torch."):
                yield from module.named_buffers(path, recurse=False)
            for name, parameter in module.named_parameters(path, recurse=False):
                if not parameter.requires_grad:
                    yield name, parameter

    return {path: _mark(tensor) for path, tensor in found()}


def _outside(task: Task, model: torch.nn.Module) -> dict[int, tuple[str, _Mark]]:
    """The tensors that the user's code holds beside those of the model, by their identity, each in words."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held = ((kind, tensor) for kind, tensor in tensors_held_by(task.training_step, model) if id(tensor) not in own)
    return {
        id(tensor): (f"a {kind}" if kind else f"a tensor of shape {tuple(tensor.shape)}", _mark(tensor))
        for kind, tensor in held
    }


def _mark(tensor: torch.Tensor) -> _Mark:
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return id(tensor), version_of(tensor), None, ""
    spread = torch.arange(NUM_ELEMENTS, device=tensor.device) * (tensor.numel() - 1) // (NUM_ELEMENTS - 1)
    sample = tensor.detach()[torch.unravel_index(spread, tensor.shape)] if tensor.dim() else tensor.detach()
    return id(tensor), version_of(tensor), tensor.data_ptr(), str(sample.tolist())


def _has_changed(before: _Mark, now: _Mark) -> bool:
    """Whether the tensor, or another in its place, is not what it was; a value that was computed anew and is the same does not count."""
    return before != now if before[0] == now[0] else before[3] != now[3]
