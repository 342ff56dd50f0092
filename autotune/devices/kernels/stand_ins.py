"""Stand-ins for operators whose results on fake tensors are unlike the real ones.

Most of them make sparse gradients, which would have no elements. How many rows a gradient really touches depends on the
indices; here none occurs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


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


def _plausible_value(tensor: torch.Tensor) -> bool | int | float | complex:
    """What is read of a fake tensor: a constant's true value, else what keeps a step on its usual path."""
    if (constant := getattr(tensor, "constant", None)) is not None:
        return constant.item()  # type: ignore[no-any-return]
    if tensor.dtype is torch.bool:
        return False
    if tensor.dtype.is_complex:
        return 1 + 0j
    return 1.0 if tensor.dtype.is_floating_point else 1


# Operator -> what stands in for it; `NotImplemented` where the operator itself will do.
SUBSTITUTES: Mapping[Any, Callable[..., Any]] = {
    _aten.clone.default: _clone,
    _aten._local_scalar_dense.default: _plausible_value,
    _aten._coalesce.default: _coalesce,
    _aten.add_.Tensor: _add_,
    _aten._embedding_bag_backward.default: _embedding_bag_backward,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
