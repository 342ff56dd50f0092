"""Memory that CUDA's kernels allocate and free inside an operator. Fake tensors do not show it.

The rules repeat what torch's host code allocates, in its order, and were compared with the requests to its caching allocator: a
structured kernel allocates its result before it copies an argument, other kernels after that. cuDNN's own workspaces are not covered,
apart from a guess for the gradients of convolutions.

Several thread blocks may share an output of a reduction (`gpu_reduce_kernel`). Where a reduction has few outputs and many inputs for each
(the gradient of a bias, batch statistics), blocks write partial results into a buffer in global memory. The buffer's size follows from
how the work is divided: `setReduceConfig` in `aten/src/ATen/native/cuda/Reduce.cuh`, which this file repeats.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from autotune.devices.kernels.rules import (
    ResultRule,
    Scratch,
    Stepped,
    Storages,
    Workspace,
    copies,
    lies_channels_last,
    round_up,
    size_bytes,
)
from autotune.devices.targets import GpuKind
from autotune.units import KIB, MIB

_aten = torch.ops.aten
_FEW_INDICES = 3072  # up to so many indices, the gradient of an embedding is summed without sorting them
_ROWS_AT_ONCE = 10  # one thread sums so many rows of a segment of equal indices
_LARGEST_OF_BAG = 2  # the mode "max" of an embedding of bags
_DIGITS, _SORTED_AT_ONCE = 256, 3840  # values of a digit that CUB sorts by, and pairs that one block sorts


def cuda_workspaces(gpu: GpuKind) -> Mapping[Any, Workspace]:
    """The rules for a GPU, by operator."""
    return {
        **_WORKSPACES,
        **{operator: partial(_reduction, gpu, *how) for operator, how in _REDUCTIONS.items()},
        _aten._scaled_dot_product_efficient_attention_backward.default: partial(_efficient_attention_backward, gpu),
        _aten.logsumexp.default: partial(_logsumexp, gpu),
        _aten.convolution_backward.default: partial(_convolution_backward, gpu),
    }


# ---------------------------------------------------------------- reductions
_SUM = 4  # bytes of a partial result: in fp32
_MOMENTS = 16  # mean, sum of squares and two counts (`WelfordData`)
_WITH_POSITION = 16  # a value and its index, aligned
_MAX_THREADS = 512  # of a block that reduces
_WARP = 32
_LOADED_TOGETHER = 4  # elements of one vector
_MIN_VALUES, _MAX_VALUES = 16, 256  # values that one thread reduces


@dataclass(frozen=True)
class _Axis:
    """Neighbouring dimensions that kernels walk through as one, with its length and the distance of neighbours in elements."""

    length: int
    stride: int


def reduction_bytes(tensor: torch.Tensor, dims: Sequence[int], partial_bytes: int, gpu: GpuKind) -> Stepped:
    """Bytes of the buffer through which thread blocks share a reduction of `tensor` over `dims`; 0 where they do not.

    Args:
        dims: the dimensions that are reduced; empty for all.
        partial_bytes: bytes of one partial result, e.g. 4 for a sum in fp32.
    """
    reduced_dims = {dim % max(1, tensor.dim()) for dim in dims} or set(range(tensor.dim()))
    return Stepped(partial(_buffer_bytes, reduced_dims, partial_bytes, gpu), (*tensor.shape, *tensor.stride()))


def _buffer_bytes(reduced_dims: set[int], partial_bytes: int, gpu: GpuKind, layout: tuple[int, ...]) -> int:
    """As `reduction_bytes`, for a tensor whose lengths and then strides are `layout`."""
    num_dims = len(layout) // 2
    lengths, strides = layout[:num_dims], layout[num_dims:]
    reduced = _axes(lengths, strides, sorted(reduced_dims, key=strides.__getitem__))
    kept_dims = [dim for dim in reversed(range(num_dims)) if dim not in reduced_dims]  # as in the result
    kept = _axes(lengths, strides, kept_dims)
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
    """The dimensions in the order of `dims`; neighbours that are contiguous in memory are joined."""
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
    """How many neighbouring outputs a thread reduces at once: the largest number of which every row's start is a multiple."""
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


def _reduction(gpu: GpuKind, dims_at: int, partial_bytes: int, args: tuple[Any, ...], result: Any) -> Scratch:
    """Partial results; for integers and booleans also a copy in the type in which they are summed."""
    tensor = args[0]
    dims = args[dims_at] if 0 < dims_at < len(args) else None
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    if partial_bytes == _SUM and not tensor.is_floating_point():
        converted = 0 if tensor.dtype is torch.int64 else 8 * tensor.numel()
        return Scratch(after=((converted, reduction_bytes(tensor, dims, 8, gpu)),))
    scale = 2 if tensor.dtype is torch.float64 else 1
    return Scratch(after=((reduction_bytes(tensor, dims, scale * partial_bytes, gpu),),))


def _logsumexp(gpu: GpuKind, args: tuple[Any, ...], result: Any) -> Scratch:
    """The exponentials of the differences from the largest, beside the partial results of their sum."""
    tensor, dims = args[:2]
    return Scratch(after=((size_bytes(tensor), reduction_bytes(tensor, list(dims), _SUM, gpu)),))


# by operator: which argument holds the dimensions, and bytes of a partial result
_REDUCTIONS: Mapping[Any, tuple[int, int]] = {
    _aten.sum.default: (0, _SUM),
    _aten.sum.dim_IntList: (1, _SUM),
    _aten.mean.default: (0, _SUM),
    _aten.mean.dim: (1, _SUM),
    _aten.nansum.default: (1, _SUM),
    _aten.prod.dim_int: (1, _SUM),
    _aten.amax.default: (1, _SUM),
    _aten.amin.default: (1, _SUM),
    _aten.linalg_vector_norm.default: (2, _SUM),
    _aten.norm.ScalarOpt_dim: (2, _SUM),
    _aten.var.correction: (1, _MOMENTS),
    _aten.std.correction: (1, _MOMENTS),
    _aten.var_mean.correction: (1, _MOMENTS),
    _aten.std_mean.correction: (1, _MOMENTS),
    _aten.max.dim: (1, _WITH_POSITION),
    _aten.min.dim: (1, _WITH_POSITION),
    _aten.argmax.default: (1, _WITH_POSITION),
    _aten.argmin.default: (1, _WITH_POSITION),
}


# ---------------------------------------------------------------- convolutions


def _convolution(args: tuple[Any, ...], result: Any) -> Scratch:
    """Copies into the convolution's memory format, which is channels last where its input or its weight is."""
    tensor, weight = args[:2]
    return Scratch(before=_format_copies(tensor, weight, like=(tensor, weight)))


def _format_copies(*tensors: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Copies of the tensors that do not lie in the memory format of `like`, which is channels last where one of those is."""
    if any(map(_has_channels_last, like)):
        return tuple(0 if lies_channels_last(each) else size_bytes(each) for each in tensors)
    return copies(*tensors)


def _has_channels_last(tensor: torch.Tensor) -> bool:
    """Whether torch, which goes by the strides, takes it for channels last; it also does so for kernels of one element."""
    return suggest_memory_format(tensor) is not torch.contiguous_format


def _pooling_backward(args: tuple[Any, ...], result: Any) -> Scratch:
    """A copy of the gradient in the memory format of the input."""
    gradient, tensor = args[:2]
    return Scratch(after=(_format_copies(gradient, like=(tensor,)),))


def _convolution_backward(gpu: GpuKind, args: tuple[Any, ...], result: Any) -> Scratch:
    """Copies of a convolution's input, output gradient and weight, and then the partial results of the bias's gradient.

    Where input or weight is channels last, torch makes the copies; else, in one group, they are a guess at cuDNN's.

    cuDNN's kernels for the two gradients read tensors with the channels last (NVIDIA, Convolutional Layers User's Guide,
    "Tensor Layouts in Memory: NCHW vs NHWC"), so other layouts are transposed in the workspace. The rest is not documented.
    Published float32 peaks on an A100 fit best with two copies of the input for a kernel of more than one element (one copy
    fits nearly as well), and with no copies for forward and grouped convolutions. The same is assumed for short types.
    """
    grad_output, tensor, weight = args[:3]
    groups, wanted = args[9], args[10]
    copied, guessed = _format_copies(tensor, grad_output, weight, like=(tensor, weight)), 0
    if not wanted[1]:  # the input is read for the gradient of the weight
        copied = (0, *copied[1:])
    if not (groups > 1 or _has_channels_last(tensor) or _has_channels_last(weight)):
        input_copies = 1 if prod(weight.shape[2:]) == 1 else 2
        copied, guessed = (), input_copies * size_bytes(tensor) + size_bytes(grad_output) + size_bytes(weight)
    dims = [0, *range(2, grad_output.dim())]
    of_bias = reduction_bytes(grad_output, dims, _SUM, gpu) if wanted[2] else 0
    return Scratch(before=copied, after=((guessed,), (of_bias,)))


# ---------------------------------------------------------------- attention


def _flash_attention_backward(args: tuple[Any, ...], result: Any) -> Scratch:
    """The sums of the rows and the query's gradient in float32, rounded as in `mha_bwd` of flash-attn's `flash_api.cpp`.

    The output and its gradient are copied where they do not lie as (sample, position, head). Where heads share keys and values,
    each has gradients of its own, summed afterwards.
    """
    grad_output, query, key, output = args[0], args[1], args[2], args[4]
    batch_size, num_heads, length, head_dim = query.shape
    length = round_up(length, 128)
    head_dim = round_up(head_dim, 32 if head_dim <= 128 else 64)
    rows_bytes = 4 * batch_size * num_heads * length
    for_each_head = num_heads // key.shape[1] * size_bytes(key) if key.shape[1] < num_heads else 0
    return Scratch(
        before=copies(grad_output.transpose(1, 2), output.transpose(1, 2)),
        after=((rows_bytes, rows_bytes * head_dim, for_each_head, for_each_head),),
    )


def _efficient_attention(args: tuple[Any, ...], result: Any) -> Scratch:
    """The output in float32 where a block's own does not fit into registers (`kernel_forward.h`)."""
    query, value = args[0], args[2]
    too_wide = query.element_size() == 2 and value.shape[-1] > 128
    return Scratch(after=((4 * prod(query.shape[:-1]) * int(value.shape[-1]) if too_wide else 0,),))


def _efficient_attention_backward(gpu: GpuKind, args: tuple[Any, ...], result: Any) -> Scratch:
    """The workspace in which blocks add to the gradients of query, key and value (`kernel_backward.h`).

    The tiles follow from the kernel that `dispatch_cutlassB` takes: the first for this type and head that the GPU can run.
    In float32 the products of the output and its gradient come before it. The gradient is copied where it does not lie as
    (sample, position, head).
    """
    grad_output, query, key = args[:3]
    is_short, head_dim = query.element_size() == 2, query.shape[-1]
    num_heads, length, num_keys = prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    rows, columns = 64, 64
    if head_dim > 64 and (is_short or gpu.capability >= (8, 0)):
        rows = 128
        columns = 128 if is_short and head_dim <= 128 and gpu.capability >= (8, 0) else 64
    tiles = -(-length // rows) * -(-head_dim // columns)
    num_bytes = tiles * (4 * rows * columns + 16)
    if is_short and head_dim > 128:
        num_splits = max(1, min(-(-num_keys // 64), 200 // num_heads))  # of the keys, where there are few heads
        num_bytes += 2 * 4 * num_splits * 64 * round_up(head_dim, 128)
    row_sums = 4 * num_heads * length
    products = () if is_short else ((4 * query.numel(), row_sums),)
    return Scratch(
        before=copies(grad_output.transpose(1, 2)), beside=(row_sums,), after=(*products, (num_heads * num_bytes,))
    )


# ---------------------------------------------------------------- the rest


def _embedding_backward(args: tuple[Any, ...], result: Any) -> Scratch:
    """The rows of each weight are summed in the order of the sorted indices (`embedding_dense_backward_cuda` of `Embedding.cu`)."""
    gradient, indices, num_rows, padding, by_frequency = args[:5]
    most_unsorted = 0 if by_frequency or padding >= 0 else _FEW_INDICES
    return _sums_of_rows(gradient, indices, num_rows, most_unsorted=most_unsorted, counts=by_frequency)


def _embedding_bag_backward(args: tuple[Any, ...], result: Any) -> Scratch:
    """As for an embedding, with the indices of all bags (`embedding_bag_backward_cuda_sum_avg` of `EmbeddingBag.cu`)."""
    gradient, indices, num_rows, by_frequency, mode, is_sparse = args[0], args[1], *args[6:10]
    if is_sparse or mode == _LARGEST_OF_BAG:
        return Scratch(before=copies(gradient))
    return _sums_of_rows(gradient, indices, num_rows, most_unsorted=0, counts=by_frequency)


def _sums_of_rows(
    gradient: torch.Tensor, indices: torch.Tensor, num_rows: int, *, most_unsorted: int, counts: bool
) -> Scratch:
    """Sorted indices and their positions, and then what `embedding_backward_cuda_kernel` allocates, each a tensor of its own.

    That finds the segments of equal indices, cuts each into parts of ten rows, and sums these in float32
    (`EmbeddingBackwardKernel.cu`): where segments begin, parts of each, the first of each, where parts begin, sums of parts.

    Args:
        most_unsorted: up to so many indices, nothing is sorted.
        counts: whether rows are divided by how often they occur.
    """
    index_bytes, sum_bytes = indices.element_size(), max(4, gradient.element_size())
    width = round_up(gradient.shape[-1], _WARP)

    def stepped(size_of: Callable[[int], int]) -> Stepped:
        return Stepped(lambda figures: size_of(figures[0]) if figures[0] > most_unsorted else 0, (indices.numel(),))

    def num_segments(number: int) -> int:
        return min(number, num_rows)

    def num_parts(number: int) -> int:
        return number // _ROWS_AT_ONCE + num_segments(number)

    of_each = stepped(lambda number: index_bytes * number)
    of_segments = stepped(lambda number: index_bytes * num_segments(number))
    of_parts = stepped(lambda number: index_bytes * num_parts(number))
    sums = stepped(lambda number: sum_bytes * num_parts(number) * width)
    return Scratch(
        before=(*copies(gradient), of_each, of_each, *((of_each,) if counts else ())),
        early=(of_each, stepped(lambda number: _sorting_bytes(number, index_bytes, num_rows))),
        beside=(of_each,),
        after=((of_each,), (of_segments, of_segments, of_parts, sums)),
    )


def _sorting_bytes(number: int, index_bytes: int, highest: int) -> int:
    """The workspace in which CUB sorts indices with their positions (`DeviceRadixSort::SortPairs`, the "onesweep" algorithm).

    It has how often each of 256 digits occurs, in every pass over 8 bits and in every tile, and where there are several passes
    another buffer for both. The pairs of a tile differ with the GPU; here they are those of one with compute capability 8.0.
    """
    num_passes = -(-highest.bit_length() // 8)
    buffers_bytes = 2 * index_bytes * number if num_passes > 1 else 0
    return buffers_bytes + _DIGITS * (8 * num_passes + 4 * -(-number // _SORTED_AT_ONCE))


def _index_put(args: tuple[Any, ...], result: Any) -> Scratch:
    """Where values are added up, they are so in the order of sorted indices (`index_put_with_sort_kernel` of `Indexing.cu`).

    One linear index is made of all (`computeLinearIndex`), a summand after the other, and sorted together with its positions.
    """
    tensor, indices = args[:2]
    accumulates = len(args) > 3 and args[3]
    of_elements = [index for index in indices if index is not None]
    if not accumulates or any(index.dtype in (torch.bool, torch.uint8) for index in of_elements):
        return Scratch()
    number = int(torch.broadcast_shapes(*(index.shape for index in of_elements)).numel())
    last = max(dim for dim, index in enumerate(indices) if index is not None)
    highest = prod(tensor.shape[: last + 1])
    of_each = Stepped(lambda figures: 8 * figures[0], (number,))
    sorting = Stepped(lambda figures: _sorting_bytes(figures[0], 8, highest), (number,))
    summands = ((of_each, of_each),) * (len(of_elements) - 1)
    return Scratch(beside=(of_each,), after=((of_each,), *summands, (of_each, of_each, of_each, sorting)))


def _softmax_backward(args: tuple[Any, ...], result: Any) -> Scratch:
    """The product of gradient and output (`SoftMax.cu`), and copies of either that is not contiguous."""
    return Scratch(after=((size_bytes(args[0]), *copies(*args[:2])),))


def _copied(*positions: int) -> Workspace:
    """Copies of the arguments at these positions where they are not contiguous."""
    return lambda args, _: Scratch(after=(copies(*(args[position] for position in positions)),))


def _elements(number: int) -> Workspace:
    """`number` tensors with the loss of every element, beside the result, their mean or sum."""

    def losses(args: tuple[Any, ...], result: Any) -> Scratch:
        size_bytes = args[0].numel() * result.element_size() if result.dim() == 0 else 0
        return Scratch(after=((size_bytes,) * number,))

    return losses


_WORKSPACES: Mapping[Any, Workspace] = {
    _aten.convolution.default: _convolution,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._embedding_bag_backward.default: _embedding_bag_backward,
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
    _aten.avg_pool2d_backward.default: _pooling_backward,
    _aten.max_pool2d_with_indices_backward.default: _pooling_backward,
    _aten.native_layer_norm.default: lambda args, _: Scratch(before=copies(args[0])),
    _aten.native_layer_norm_backward.default: _copied(0, 1),
    _aten._softmax.default: _copied(0),
    _aten._log_softmax.default: _copied(0),
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _copied(0, 1),
    _aten.upsample_nearest2d_backward.default: _copied(0),
    _aten.upsample_bilinear2d_backward.default: _copied(0),
    _aten.binary_cross_entropy_with_logits.default: _elements(2),
    _aten.binary_cross_entropy.default: _elements(1),
    _aten.huber_loss.default: _elements(1),
}


def _mask_first(args: tuple[Any, ...], result: Any) -> Storages:
    """The mask of a dropout is allocated before the output (`dropout_cuda` of Dropout.cu)."""
    return [(tensor, size_bytes(tensor)) for tensor in reversed(result)]


def _bags(args: tuple[Any, ...], result: Any) -> Storages:
    """The sizes of bags and the bag of each index are allocated before the output (`_embedding_bag_cuda` of `EmbeddingBag.cu`).

    Fake tensors show what a CPU's kernel keeps, which leaves out the bag of each index where it only sums.
    """
    output, bag_of_index, bag_sizes, largest = result
    indices, offsets = args[1], args[2]
    index_bytes = max(indices.element_size(), offsets.element_size())
    of_largest = index_bytes * output.numel() if len(args) > 4 and args[4] == _LARGEST_OF_BAG else 0
    return [
        (bag_sizes, index_bytes * offsets.numel()),
        (bag_of_index, index_bytes * indices.numel()),
        (output, size_bytes(output)),
        (largest, of_largest),
    ]


CUDA_RESULTS: Mapping[Any, ResultRule] = {
    _aten.native_dropout.default: _mask_first,
    _aten._embedding_bag.default: _bags,
    _aten._embedding_bag_forward_only.default: _bags,
}


_NUM_HANDLES = 2  # cuBLAS has one for each thread that computes products: the thread that trains, and autograd's own


def cublas_workspaces(gpu: GpuKind) -> tuple[int, ...]:
    """Bytes of each workspace of cuBLAS, which torch takes from its caching allocator and keeps.

    Chosen as by `getChosenWorkspaceSize` in `aten/src/ATen/cuda/CublasHandlePool.cpp`: CUBLAS_WORKSPACE_CONFIG gives the size, such
    as `:4096:8` for eight buffers of 4096 KiB. Without it data centre GPUs since Hopper get 32 MiB, others 8 MiB and 128 KiB.
    """
    said = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    size_bytes = 32 * MIB if gpu.capability[0] in (9, 10) else 8 * MIB + 128 * KIB
    if said:
        size_bytes = sum(int(kib) * int(number) for kib, number in said) * KIB
    return (size_bytes,) * _NUM_HANDLES
