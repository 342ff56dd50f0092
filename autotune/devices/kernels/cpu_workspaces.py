"""Memory that CPU kernels allocate and fake tensors do not show: scratch inside an operator, and larger results.

The rules for oneDNN's operators follow its behaviour on processors with AVX-512, as the profiler's allocation events show it.
Scratchpads that depend on the instruction set (some 100 KiB) are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autotune.devices.kernels.rules import (
    ResultRule,
    Scratch,
    Storages,
    Workspace,
    copies,
    lies_channels_last,
    round_up,
    size_bytes,
)

_aten = torch.ops.aten
# (an operator's arguments, its result) -> the most bytes that it allocates beside the result. On a CPU the order does not matter.
_Peak = Callable[[tuple[Any, ...], Any], int]

_CHANNELS_PER_BLOCK = 16  # oneDNN's nChw16c, for float32
_FEW_CHANNELS = 3  # inputs with at most so many channels are read without a copy
_TILES_BYTES = 64 * 2**10  # for AMX, at least
_PAGE_BYTES = 4096


def cpu_workspace(operator: Any) -> Workspace | None:
    """The rule for what an operator allocates and frees on a CPU; None if it allocates nothing."""
    peak = _WORKSPACES.get(operator)
    if peak is None and torch.Tag.pointwise in operator.tags:
        peak = _casts
    return None if peak is None else lambda args, result: Scratch(after=((peak(args, result),),))


def _casts(args: tuple[Any, ...], result: Any) -> int:
    """Copies of operands that do not have the common type (TensorIterator::compute_types; CUDA's kernels convert as they read)."""
    operands = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 0]
    if len(operands) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    cast = [operand for operand in operands if operand.dtype != common and operand.dtype is not torch.bool]
    if result is args[0] and result.dtype != common:
        cast.append(result)
    return sum(operand.numel() for operand in cast) * common.itemsize


def _mean(args: tuple[Any, ...], result: Any) -> int:
    """The mean of a short type is computed in float32, on a copy."""
    tensor = args[0]
    return 4 * tensor.numel() if tensor.dtype in (torch.float16, torch.bfloat16) else 0


def _flash_attention(args: tuple[Any, ...], result: Any) -> int:
    """Blocks of scores and of the output for each thread; short types are packed for AMX (FlashAttentionKernel.cpp)."""
    query, key, value = args[:3]
    length, head_dim = query.shape[2], query.shape[3]
    rows, columns = _query_block(length), min(512, int(key.shape[2]))
    floats = torch.get_num_threads() * (rows * columns + 2 * rows + rows * int(head_dim))
    if query.dtype is torch.float32:
        return 4 * floats
    return 4 * floats + torch.get_num_threads() * rows * columns * 2 + size_bytes(key) + size_bytes(value)


def _flash_attention_backward(args: tuple[Any, ...], result: Any) -> int:
    """Two blocks of scores for each thread, in float32 and in the type itself (FlashAttentionKernel.cpp)."""
    query, key = args[1], args[2]
    scores = torch.get_num_threads() * 2 * _query_block(query.shape[2]) * min(512, int(key.shape[2]))
    return scores * (4 if query.dtype is torch.float32 else 6)


def _query_block(length: int) -> int:
    return 256 if length >= 768 else 64 if length >= 192 else 32


def _convolution(args: tuple[Any, ...], result: Any) -> int:
    """Copies of input, weight and result in oneDNN's own layout; two copies of the result in a short type."""
    tensor, weight = args[:2]
    if not uses_onednn(tensor, weight, strides=args[3], dilations=args[5], groups=args[8]):
        return _columns(tensor, weight, result)
    if _is_channels_last(tensor) or _is_channels_last(weight):
        return size_bytes(weight) + _channels_last_copy(tensor)
    if tensor.dtype is not torch.float32:
        return max(_copied_input(tensor) + size_bytes(weight), 2 * size_bytes(result))
    blocked = _blocked(result)
    return max(_copied_input(tensor) + size_bytes(weight) + blocked - size_bytes(result), blocked)


def _convolution_backward(args: tuple[Any, ...], result: Any) -> int:
    """Such copies for the gradient of the input (two where there are strides), and then for the weight's gradient beside it."""
    gradient, tensor, weight = args[:3]
    wants_input, wants_weight = (bool(wanted) for wanted in args[10][:2])
    if not uses_onednn(tensor, weight, strides=args[4], dilations=args[6], groups=args[9]):
        return _columns(tensor, weight, gradient)
    input_bytes, weight_bytes = size_bytes(tensor) * wants_input, size_bytes(weight) * wants_weight
    if _is_channels_last(tensor) or _is_channels_last(weight):
        return _channels_last_copy(tensor) + _channels_last_copy(gradient) + 2 * size_bytes(weight)
    twice = tensor.dtype is not torch.float32 or any(stride > 1 for stride in args[4])
    peak = 0
    if wants_input:
        blocked = size_bytes(tensor) if twice else _blocked(tensor)
        peak = max(_blocked(gradient) + size_bytes(weight) + blocked, blocked + (1 + twice) * size_bytes(tensor))
    if wants_weight:
        copies = _copied_input(tensor) + _blocked(gradient) + weight_bytes
        if tensor.dtype is torch.bfloat16:
            copies += 2 * weight_bytes + _TILES_BYTES  # summed in float32
        elif tensor.dtype is torch.float16:
            copies = 0
        peak = max(peak, input_bytes + copies, input_bytes + 2 * weight_bytes)
    return max(0, peak - input_bytes - weight_bytes)


def uses_onednn(
    tensor: torch.Tensor, weight: torch.Tensor, *, strides: list[int], dilations: list[int], groups: int
) -> bool:
    """ConvParams::use_mkldnn of Convolution.cpp: in float32 all convolutions but those of one small sample, or plain 1x1 on one thread."""
    if not torch.backends.mkldnn.is_available():
        return False
    if tensor.dtype is not torch.float32:
        return True
    pointwise = all(size == 1 for size in weight.shape[2:]) and not any(s > 1 for s in (*strides, *dilations))
    if pointwise and tensor.shape[0] < 16 and torch.get_num_threads() == 1:
        return False
    large_kernel = all(size > 3 for size in weight.shape[2:])
    return groups > 1 or large_kernel or tensor.shape[0] > 1 or tensor.numel() > 20480


def _columns(tensor: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> int:
    """Every patch of the input as a column (slow_conv2d)."""
    patch = weight[0].numel()
    positions = output.numel() // max(1, output.shape[1])
    return 0 if patch == weight.shape[1] else patch * positions * tensor.element_size()


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() and lies_channels_last(tensor)


def _channels_last_copy(tensor: torch.Tensor) -> int:
    return 0 if lies_channels_last(tensor) else size_bytes(tensor)


def _blocked(tensor: torch.Tensor) -> int:
    """Bytes of a copy in oneDNN's layout, in float32 with the channels rounded up."""
    if tensor.dtype is not torch.float32:
        return size_bytes(tensor)
    return size_bytes(tensor) // tensor.shape[1] * round_up(tensor.shape[1], _CHANNELS_PER_BLOCK)


def _copied_input(tensor: torch.Tensor) -> int:
    few = tensor.shape[1] <= (_FEW_CHANNELS if tensor.dtype is torch.float32 else 1)
    return 0 if few else _blocked(tensor)


def _lstm(args: tuple[Any, ...], result: Any) -> int:
    """Both weights in oneDNN's layout, and the gates of all steps (float32)."""
    weights = size_bytes(args[1]) + size_bytes(args[2])
    if args[0].dtype is not torch.float32:
        return weights
    return weights + _lstm_gates(args[0], int(args[10]))


def _lstm_backward(args: tuple[Any, ...], result: Any) -> int:
    """As for `_lstm`, with weights and inputs in float32."""
    size = 4 // int(args[0].element_size())
    weights = size * (size_bytes(args[1]) + size_bytes(args[2]))
    if size == 1:
        return weights + _lstm_gates(args[0], args[2].shape[1])
    return weights + size * size_bytes(args[0]) + weights // size


def _lstm_gates(tensor: torch.Tensor, hidden: int) -> int:
    steps, samples = tensor.shape[:2]
    size = tensor.element_size()
    return int(steps * samples * _leading_dimension(4 * hidden, size) * size)


def _lstm_results(args: tuple[Any, ...], result: Any) -> Storages:
    """Memory that an LSTM keeps for its backward pass; fake tensors show it empty (oneDNN's rnn_utils.cpp, set_offsets).

    It holds gates, states and their gradients for every step, each aligned to a page.
    """
    if not args[15]:
        return []
    tensor, hidden = args[0], int(args[10])
    steps, samples, features = tensor.shape
    size = tensor.element_size()
    rows = 2 * (steps + 1) * samples  # of the layer and of the one below it
    widest = max(features, hidden)
    state_bytes = rows * _leading_dimension(widest, size) * size
    arrays = (
        _lstm_gates(tensor, hidden),
        *(state_bytes, state_bytes, rows * _leading_dimension(widest, 4) * 4, rows * hidden * 4, rows * hidden * 4),
        steps * samples * _leading_dimension(hidden, size) * size,
    )
    return [(result[3], sum(round_up(array, _PAGE_BYTES) for array in arrays))]


def _leading_dimension(columns: int, element_bytes: int) -> int:
    """oneDNN's get_good_ld: whole cache lines, and no multiple of 256 elements."""
    line = 64 // element_bytes
    rounded = round_up(columns, line)
    return rounded + line if rounded % 256 == 0 else rounded


_WORKSPACES: Mapping[Any, _Peak] = {
    # the bag of every index (make_offset2bag)
    _aten._embedding_bag.default: lambda args, _: size_bytes(args[1]),
    # the sorted indices, their order, and how often each occurs (_embedding_bag_dense_backward_cpu)
    _aten._embedding_bag_backward.default: lambda args, result: 0 if result.is_sparse else 3 * size_bytes(args[1]),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_attention_backward,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.mean.default: _mean,
    _aten.mean.dim: _mean,
    _aten.mkldnn_rnn_layer.default: _lstm,
    _aten.mkldnn_rnn_layer_backward.default: _lstm_backward,
    # the input less its mean (batch_norm_backward_cpu_template)
    _aten.native_batch_norm_backward.default: lambda args, _: size_bytes(args[1]),
    _aten.native_layer_norm.default: lambda args, _: sum(copies(args[0])),
    _aten.native_layer_norm_backward.default: lambda args, _: sum(copies(*args[:2])),
}

CPU_RESULTS: Mapping[Any, ResultRule] = {_aten.mkldnn_rnn_layer.default: _lstm_results}
