"""Which kernels oneDNN compiles for the operators of a step: one for each shape, and it keeps those of many shapes.

Where batches have many shapes, as lines of text do, these kernels can hold more memory than the tensors.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from autotune.predict.cpu_workspaces import uses_onednn
from autotune.predict.storages import Kernels

_aten = torch.ops.aten

_CAPACITY = 1024  # kernels in oneDNN's cache, unless the environment says otherwise


def most_kernels() -> int:
    """How many kernels a process keeps, those used last (oneDNN's developer guide, Primitive Cache)."""
    return int(os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _CAPACITY))


def _product(args: tuple[Any, ...]) -> list[Hashable]:
    """Of short types alone: float32 is multiplied by the BLAS, without a kernel for each shape (mkldnn_matmul of LinearAlgebra.cpp)."""
    left, right = args[-2:]
    return [_key("product", left, right)] if _multiplies(left.dtype) else []


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    if dtype not in (torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return False
    supported = torch.ops.mkldnn
    return bool(
        supported._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else supported._is_mkldnn_fp16_supported()
    )


def _convolution(args: tuple[Any, ...]) -> list[Hashable]:
    tensor, weight = args[:2]
    if not uses_onednn(tensor, weight, strides=args[3], dilations=args[5], groups=args[8]):
        return []
    return [_key("convolution", tensor, weight)]


def _convolution_backward(args: tuple[Any, ...]) -> list[Hashable]:
    """One for the gradient of the input, one for that of the weight."""
    tensor, weight = args[1:3]
    if not uses_onednn(tensor, weight, strides=args[4], dilations=args[6], groups=args[9]):
        return []
    names = ("convolution backward, input", "convolution backward, weight")
    return [_key(name, tensor, weight) for name, wanted in zip(names, args[10], strict=False) if wanted]


def _layer(name: str) -> Kernels:
    return lambda args: [_key(name, args[0], args[1])]


def _key(name: str, *tensors: torch.Tensor) -> Hashable:
    return name, *((tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) for tensor in tensors)


ONEDNN_KERNELS: Mapping[Any, Kernels] = {
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _product,
    _aten.baddbmm.default: _product,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.mkldnn_rnn_layer.default: _layer("recurrence"),
    _aten.mkldnn_rnn_layer_backward.default: _layer("recurrence backward"),
}
