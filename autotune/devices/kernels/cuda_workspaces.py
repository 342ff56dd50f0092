"""Memory that CUDA's kernels allocate and free inside an operator. Fake tensors do not show it."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from autotune.devices.kernels.rules import Workspace

_aten = torch.ops.aten


def _convolution_backward(args: tuple[Any, ...], result: Any) -> int:
    """Copies of a convolution's input, output gradient and weight in the layout that the tensor cores read.

    cuDNN's kernels for the two gradients read tensors with the channels last (NVIDIA, Convolutional Layers User's Guide,
    "Tensor Layouts in Memory: NCHW vs NHWC"), so other layouts are transposed in the workspace. The rest is not documented.
    Published float32 peaks on an A100 fit best with two copies of the input for a kernel of more than one element (one copy
    fits nearly as well), and with no copies for forward and grouped convolutions. The same is assumed for short types.
    """
    grad_output, tensor, weight = args[:3]
    groups = args[9]
    if groups > 1 or _has_channels_last(tensor):
        return 0
    input_copies = 1 if prod(weight.shape[2:]) == 1 else 2
    return input_copies * _size_bytes(tensor) + _size_bytes(grad_output) + _size_bytes(weight)


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _has_channels_last(tensor: torch.Tensor) -> bool:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def _flash_attention_backward(args: tuple[Any, ...], result: Any) -> int:
    """The query's gradient and the sums of its rows in float32, rounded as in `mha_bwd` of flash-attn's `flash_api.cpp`."""
    query = args[1]
    batch_size, num_heads, length, head_dim = query.shape
    length = -(-length // 128) * 128
    head_dim = -(-head_dim // 32) * 32
    num_bytes: int = 4 * prod((batch_size, num_heads, length, head_dim + 1))
    return num_bytes


CUDA_WORKSPACES: Mapping[Any, Workspace] = {
    _aten.convolution_backward.default: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
}
