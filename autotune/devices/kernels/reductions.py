"""Memory that torch's CUDA reductions allocate while several thread blocks share an output: `gpu_reduce_kernel`.

Where a reduction has few outputs and many inputs for each (the gradient of a bias, batch statistics), blocks write partial
results into a buffer in global memory. Its size follows from how the work is divided, `setReduceConfig` in
`aten/src/ATen/native/cuda/Reduce.cuh`, which this file repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from autotune.devices.kernels.rules import Stepped
from autotune.devices.targets import GpuKind

_MAX_THREADS = 512  # of a block that reduces
_WARP = 32
_LOADED_TOGETHER = 4  # elements of one vector
_MIN_VALUES, _MAX_VALUES = 16, 256  # that a thread reduces


@dataclass(frozen=True)
class _Axis:
    """Neighbouring dimensions that kernels walk through as one: its length, and elements between neighbours."""

    length: int
    stride: int


def reduction_bytes(tensor: torch.Tensor, dims: Sequence[int], partial_bytes: int, gpu: GpuKind) -> Stepped:
    """Bytes of the buffer with which a reduction of `tensor` over `dims` is shared by thread blocks; 0 where none is.

    Args:
        dims: those that are reduced; none for all of them.
        partial_bytes: of one partial result, e.g. 4 of a sum in fp32.
    """
    reduced_dims = {dim % max(1, tensor.dim()) for dim in dims} or set(range(tensor.dim()))
    return Stepped(partial(_buffer_bytes, reduced_dims, partial_bytes, gpu), (*tensor.shape, *tensor.stride()))


def _buffer_bytes(reduced_dims: set[int], partial_bytes: int, gpu: GpuKind, layout: tuple[int, ...]) -> int:
    """Likewise, of a tensor with these lengths and strides."""
    num_dims = len(layout) // 2
    lengths, strides = layout[:num_dims], layout[num_dims:]
    reduced = _axes(lengths, strides, sorted(reduced_dims, key=strides.__getitem__))
    kept = _axes(
        lengths, strides, [dim for dim in reversed(range(num_dims)) if dim not in reduced_dims]
    )  # as in the result
    num_inputs, num_outputs = prod(axis.length for axis in reduced), prod(axis.length for axis in kept)
    if num_inputs * num_outputs == 0 or not reduced:
        return 0
    along_fastest = not kept or reduced[0].stride < kept[0].stride
    vector = 1
    if along_fastest:
        width_limit, height_limit = num_inputs, num_outputs
        if reduced[0].stride == 1 and num_inputs > 128 and not kept and len(reduced) == 1:
            width_limit //= _LOADED_TOGETHER
    else:
        width_limit, height_limit = num_outputs, num_inputs
        if kept[0].stride == 1:
            vector = _vector_of([*reduced, *kept], kept[0])
            width_limit //= vector
    width, height = _block(width_limit, height_limit, _MAX_THREADS // vector)
    step_input, step_output = (width, 1) if along_fastest else (1, width)
    if -(-num_inputs // step_input) < min(height * _MIN_VALUES, _MAX_VALUES):
        return 0  # each warp has outputs of its own
    step_input *= height
    values = -(-num_inputs // step_input)
    grid = -(-(num_outputs // vector) // step_output)
    wanted = gpu.num_multiprocessors * (gpu.threads_per_multiprocessor // (width * height))
    if values < _MAX_VALUES or grid > wanted:
        return 0
    sharing = max(min(-(-wanted // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if sharing <= 1:
        return 0
    return partial_bytes * num_outputs * sharing * (1 if along_fastest else width * vector)


def _axes(lengths: Sequence[int], strides: Sequence[int], dims: Sequence[int]) -> list[_Axis]:
    """The dimensions in this order, neighbours joined where they lie behind each other."""
    axes: list[_Axis] = []
    for dim in dims:
        length, stride = lengths[dim], strides[dim]
        if length == 1:
            continue
        if axes and axes[-1].stride * axes[-1].length == stride:
            axes[-1] = _Axis(axes[-1].length * length, axes[-1].stride)
        else:
            axes.append(_Axis(length, stride))
    return axes or [_Axis(1, 1)] if dims else []


def _vector_of(axes: Sequence[_Axis], fastest: _Axis) -> int:
    """How many neighbouring outputs a thread reduces at once: as many as every row begins at a multiple of."""
    vector = _LOADED_TOGETHER
    for number in (fastest.length, *(axis.stride for axis in axes if axis is not fastest)):
        while number % vector:
            vector //= 2
    return vector


def _block(width_limit: int, height_limit: int, max_threads: int) -> tuple[int, int]:
    width_limit, height_limit = (
        max_threads if limit >= max_threads else 2 ** max(0, limit.bit_length() - 1)
        for limit in (width_limit, height_limit)
    )
    width = min(width_limit, _WARP)
    height = min(height_limit, max_threads // width)
    return min(width_limit, max_threads // height), height
