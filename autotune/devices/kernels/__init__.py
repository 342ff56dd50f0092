"""Memory that operators allocate and fake tensors do not show, on any device and on one kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autotune.devices import capabilities_of
from autotune.devices.kernels.cpu_workspaces import CPU_RESULTS, cpu_workspace
from autotune.devices.kernels.cuda_workspaces import CUDA_RESULTS, cuda_workspaces
from autotune.devices.kernels.rules import Hidden, ResultRule, Scratch, Storages, Workspace
from autotune.devices.targets import Target, gpu_of

_aten = torch.ops.aten


def _safe_softmax(args: tuple[Any, ...], result: Any) -> Scratch:
    """A mask of the scores that are minus infinity, and one of the rows with no other score (a composite kernel: SoftMax.cpp)."""
    scores, dim = args[:2]
    return Scratch(after=((scores.numel(), scores.numel() // max(1, scores.shape[dim])),))


def _losses(args: tuple[Any, ...], result: Any) -> Scratch:
    """The loss of every element, whose mean or sum is the result (structured kernels of Loss.cpp)."""
    size: int = result.element_size()
    return Scratch(after=((_num_losses(args) * size if result.dim() == 0 else 0,),))


def _reduced_loss(args: tuple[Any, ...], result: Any) -> Storages:
    """The mean or sum lies in a storage that was allocated for the loss of every element (Loss.cpp)."""
    return [(result, _num_losses(args) * result.element_size())] if result.dim() == 0 else []


def _num_losses(args: tuple[Any, ...]) -> int:
    return int(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())


_WORKSPACES: Mapping[Any, Workspace] = {
    _aten._safe_softmax.default: _safe_softmax,
    _aten.mse_loss.default: _losses,
    _aten.smooth_l1_loss.default: _losses,
}
_RESULTS: Mapping[Any, ResultRule] = {
    _aten.mse_loss.default: _reduced_loss,
    _aten.smooth_l1_loss.default: _reduced_loss,
}


def hidden_allocations(target: Target) -> Hidden:
    """The rules for a kind of device."""
    if capabilities_of(target).own_processors:
        on_cuda = cuda_workspaces(gpu_of(target))
        return Hidden(lambda operator: _WORKSPACES.get(operator) or on_cuda.get(operator), {**_RESULTS, **CUDA_RESULTS})
    return Hidden(
        lambda operator: _WORKSPACES.get(operator) or cpu_workspace(operator),
        {**_RESULTS, **CPU_RESULTS},
    )
