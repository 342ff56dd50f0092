"""What makes a session run on fake tensors, with stand-ins for operators whose results on them are unlike the real ones.

Most stand-ins make sparse gradients, which would have no elements. How many rows a gradient really touches depends on the
indices; here none occurs twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode

from autotune import techniques
from autotune.devices.kernels.cuda_like import cuda_like
from autotune.devices.targets import CPU, CUDA, Target

_aten = torch.ops.aten


class OneFakeMode(FakeTensorMode):
    """Stays itself when a module is deep-copied, whose fake parameters refer to it: two modes do not mix."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OneFakeMode:
        return self


@contextmanager
def fake_run(mode: FakeTensorMode, target: Target) -> Iterator[None]:
    """Run on fake tensors, as on a device of the kind `target`. Puts torch back at the end."""
    with (
        warnings.catch_warnings(action="ignore"),
        techniques.restored_settings(),
        nullcontext() if target == CPU else cuda_like(flash_attention=target == CUDA),
        mock.patch.object(torch.utils, "swap_tensors", _take_data),
        mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", _always_step),
        mode,
    ):
        yield


def _take_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """What `Module.to` does with real parameters; it would exchange fake ones, whose weak references forbid it."""
    tensor.data = other.data


def _always_step(self: Any, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `GradScaler._maybe_opt_step`, to which every fake gradient seems infinite."""
    return optimizer.step(*args, **kwargs)


def to_fake(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """The model with fake parameters and buffers in place of its own; what was shared stays shared."""
    for module in model.modules():
        owners: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for owned in owners:
            for name, tensor in owned.items():
                if tensor is not None:
                    owned[name] = mode.from_tensor(tensor)
    return model


def _new(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return _aten._sparse_coo_tensor_with_dims_and_tensors(  # type: ignore[no-any-return]
        indices.shape[0],
        values.dim() - 1,
        list(shape),
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
    )


def _clone(tensor: torch.Tensor, **_: Any) -> Any:
    """No copy of contiguous values: the autograd engine asks for one only because Python refers to them as well.

    Without Python it takes a gradient as it is (torch/csrc/autograd/functions/accumulate_grad.h).
    """
    if tensor.layout is not torch.sparse_coo:
        return NotImplemented
    indices, values = tensor._indices(), tensor._values()
    if indices.is_contiguous() and values.is_contiguous():
        return _new(indices, values, tensor.shape)
    return _new(indices.clone(), values.contiguous(), tensor.shape)


def _coalesce(tensor: torch.Tensor) -> torch.Tensor:
    parts = tensor._indices().clone(), tensor._values().clone()
    return _new(*parts, tensor.shape)._coalesced_(True)


def _add_(tensor: torch.Tensor, other: Any, **_: Any) -> Any:
    """The sum, for the tracker to put in the tensor's place: sparse tensors are added by joining their elements."""
    if tensor.layout is not torch.sparse_coo or not isinstance(other, torch.Tensor):
        return NotImplemented
    indices = torch.cat([tensor._indices(), other._indices()], 1)
    values = torch.cat([tensor._values(), other._values()])
    return _new(indices, values, tensor.shape)


def _embedding_bag_backward(*args: Any, **_: Any) -> Any:
    """A row of values for each index."""
    gradient, indices, num_weights, sparse = args[0], args[1], args[6], args[9]
    if not sparse:
        return NotImplemented
    dim = gradient.shape[1]
    values = torch.empty((indices.numel(), dim), dtype=gradient.dtype, device=gradient.device)
    return _new(indices.reshape(1, -1), values, (num_weights, dim))


def _group_norm_backward(*args: Any, **_: Any) -> Any:
    """In the input's type; in float32 it would be where that is a short one."""
    tensor, weight, wanted = args[1], args[4], args[9]
    like_weight = torch.empty_like(weight) if weight is not None else tensor.new_empty(args[6])
    results = (torch.empty_like(tensor), like_weight, torch.empty_like(like_weight))
    return tuple(result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=True))


# Operator -> what stands in for it; `NotImplemented` where the operator itself will do.
SUBSTITUTES: Mapping[Any, Callable[..., Any]] = {
    _aten.clone.default: _clone,
    _aten._coalesce.default: _coalesce,
    _aten.add_.Tensor: _add_,
    _aten._embedding_bag_backward.default: _embedding_bag_backward,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
