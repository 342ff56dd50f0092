"""Makes operators on CPU tensors allocate and keep memory as on a CUDA card, for runs on fake tensors.

Fake tensors on `cuda` cannot run a backward pass where there is no card, so a run for a card is traced on fake `cpu` tensors. Four things
then differ from CUDA, and are changed here:

- the lists by which autocast chooses an operator's type (`aten/src/ATen/autocast_mode.h`; documented under "CUDA Ops
  that can autocast" of `torch.amp`). torch itself says which operators CUDA's lists name; how these are treated stands here;
- the kernel behind `scaled_dot_product_attention` (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`);
- the kernel behind `dropout`, which makes a mask of booleans on CUDA (`aten/src/ATen/native/Dropout.cpp`);
- the memory format of `group_norm`'s result.

Recurrent layers stay as on a CPU, because what cuDNN keeps for their backward pass is not known without it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

_aten = torch.ops.aten
_SHORT_TYPES = (torch.float16, torch.bfloat16)

# How CUDA's autocast treats the operators in its lists; those not named here run in float32.
_IN_LOWER_TYPE = frozenset({
    "_convolution", "_convolution.deprecated", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "einsum", "gru_cell", "linalg_multi_dot", "linalg_vecdot", "linear",
    "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention",
})  # fmt: skip
_IN_WIDEST_TYPE = frozenset({
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "vdot",
})  # fmt: skip
_WITH_FLOAT32_RESULT = frozenset({
    "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm", "log_softmax.int", "prod",
    "prod.dim_int", "softmax.int", "sum", "sum.dim_IntList",
})  # fmt: skip
_NORMS = {
    "norm.Scalar": "ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
}  # -> the overload with a result type
_FUSED = frozenset({"log_softmax.int", "softmax.int"})  # short types are converted as they are read, without a copy
_ONLY_ON_CUDA = frozenset({"cudnn_convolution", "cudnn_convolution_transpose"})
_KEPT_ON_CPU = frozenset({"mkldnn_rnn_layer"})  # on CUDA cuDNN takes its place, and runs in the lower type as well

_FLASH_HEAD_DIM = 256
_FLASH_HEAD_DIM_MULTIPLE = 8
_EFFICIENT_ALIGNMENT_BYTES = 16
_MASK_MULTIPLE = 16


@contextmanager
def cuda_like(*, flash_attention: bool = True) -> Iterator[None]:
    """Replace kernels of CPU tensors by what CUDA would do, in the whole process, and restore them at the end.

    Only fake tensors can run meanwhile, because the new kernels call operators that exist on CUDA alone.

    Args:
        flash_attention: whether flash attention runs on the card.
    """
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")  # overriding is what is wanted
        _replace_autocast(library)
        attention = functools.partial(_attention, has_flash=flash_attention)
        for key in ("AutogradCPU", "CPU"):  # these operators are made of others, which have gradients of their own
            library.impl("scaled_dot_product_attention", attention, key)
            library.impl("dropout", _dropout, key)
            library.impl("group_norm", _group_norm, key)
        yield


def _replace_autocast(library: torch.library.Library) -> None:
    names = torch._C._dispatch_get_all_op_names()
    like_cuda, left_alone = _autocast_lists(tuple(name for name in names if name.startswith("aten::")))
    for name in like_cuda:
        library.impl(name, _autocast_kernel(name), "AutocastCPU")
    for name in left_alone:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")


@functools.cache  # a run begins often, and this asks torch some thousand questions
def _autocast_lists(qualified: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The operators that autocast treats otherwise on CUDA than on a CPU, and those that it treats on a CPU alone."""
    like_cuda, left_alone = [], []
    for name in (name.removeprefix("aten::") for name in qualified):
        on_cuda, on_cpu = _has_kernel(name, "AutocastCUDA"), _has_kernel(name, "AutocastCPU")
        if on_cuda and name not in _ONLY_ON_CUDA and not (on_cpu and name in _IN_LOWER_TYPE):
            like_cuda.append(name)
        elif on_cpu and not on_cuda and name not in _KEPT_ON_CPU:
            left_alone.append(name)
    return like_cuda, left_alone


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


def _autocast_kernel(name: str) -> Callable[..., Any]:
    """What CUDA's autocast does for an operator before it runs."""
    packet, _, overload = name.partition(".")
    treat = _treatment(name, getattr(getattr(_aten, packet), overload or "default"))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return treat(*args, **kwargs)

    return kernel


def _treatment(name: str, operator: Any) -> Callable[..., Any]:
    if name == "binary_cross_entropy":
        return _refuse_binary_cross_entropy
    if name in _NORMS:
        return _with_float32_norm(operator, getattr(_aten.norm, _NORMS[name]))
    if name in _WITH_FLOAT32_RESULT:
        return _with_float32_result(operator, fused=name in _FUSED)

    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32
        if name in _IN_LOWER_TYPE or (name in _IN_WIDEST_TYPE and not _has_float32((args, kwargs))):
            dtype = torch.get_autocast_dtype("cpu")
        args, kwargs = tree_map_only(
            torch.Tensor, lambda each: each.to(dtype) if _is_castable(each) else each, (args, kwargs)
        )
        return operator(*args, **kwargs)

    return cast


def _is_castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _has_float32(values: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 for leaf in tree_leaves(values))


def _with_float32_result(operator: Any, *, fused: bool) -> Callable[..., Any]:
    """Ask an operator for a float32 result where the caller asks for no type."""
    position = [argument.name for argument in operator._schema.arguments].index("dtype")

    def treat(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs.get("dtype")
        if given is None and _is_castable(args[0]):
            kwargs["dtype"] = given = torch.float32
            args = args[:position]
        if fused and given is torch.float32 and args[0].dtype in _SHORT_TYPES:
            return _ShortToFloat32.apply(args[0])  # type: ignore[no-untyped-call]
        return operator(*args, **kwargs)

    return treat


class _ShortToFloat32(torch.autograd.Function):
    """The memory of a softmax from a short type to float32: the result is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.short_type = tensor.dtype
        result = torch.empty(tensor.shape, dtype=torch.float32)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (result,) = ctx.saved_tensors
        return torch.empty_like(result, dtype=ctx.short_type)


def _with_float32_norm(operator: Any, typed: Any) -> Callable[..., Any]:
    def treat(tensor: torch.Tensor, *args: Any) -> Any:
        if not _is_castable(tensor):
            return operator(tensor, *args)
        defaults = [argument.default_value for argument in operator._schema.arguments[1:]]
        return typed(tensor, *args, *defaults[len(args) :], dtype=torch.float32)

    return treat


def _refuse_binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is unsafe to autocast, and refused on CUDA; use binary_cross_entropy_with_logits instead"
    )


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """CUDA's result has the default memory format; the CPU's kernel keeps the input's (`group_norm.cpp`)."""
    samples, channels = input.shape[:2]
    rest = math.prod(input.shape[2:])
    tensors = (None if tensor is None else tensor.contiguous() for tensor in (weight, bias))
    normalised = _aten.native_group_norm(input.contiguous(), *tensors, samples, channels, rest, num_groups, eps)
    return normalised[0]  # type: ignore[no-any-return]


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1 and tensor.numel() > 0:
        return torch.native_dropout(tensor, p, True)[0]
    if not train or p == 0 or tensor.numel() == 0:
        return tensor
    return tensor * torch.zeros((), dtype=tensor.dtype)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    has_flash: bool,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the kernel that CUDA would take: flash, memory-efficient, or plain arithmetic."""
    is_regular = _is_regular(query, key, value)
    has_equal_heads = is_regular and query.shape[1] == key.shape[1] == value.shape[1]
    if (
        has_flash
        and torch.backends.cuda.flash_sdp_enabled()
        and attn_mask is None
        and query.dtype in _SHORT_TYPES
        and is_regular
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _FLASH_HEAD_DIM
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and (enable_gqa or has_equal_heads)
    ):
        head_dim = query.shape[-1]
        scale = head_dim**-0.5 if scale is None else scale
        padded = [_pad_last(tensor, _FLASH_HEAD_DIM_MULTIPLE) for tensor in (query, key, value)]
        output = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :head_dim]  # type: ignore[no-any-return]
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:  # a mask that can be added to the scores
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    multiple = _EFFICIENT_ALIGNMENT_BYTES // query.element_size()
    if (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (torch.float32, *_SHORT_TYPES)
        and query.shape[-1] % multiple == value.shape[-1] % multiple == 0
        and (mask is None or mask.dtype == query.dtype)
        and not enable_gqa
        and has_equal_heads
    ):
        if mask is not None:
            mask = _pad_last(mask, _MASK_MULTIPLE)[..., : mask.shape[-1]]
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        keeps_sums = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, mask, keeps_sums, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _is_regular(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether each is (batch, heads, length, head dimension) and not empty, and all have one type and batch size."""
    tensors = (query, key, value)
    return (
        all(tensor.dim() == 4 and tensor.numel() > 0 and tensor.stride(-1) == 1 for tensor in tensors)
        and query.dtype == key.dtype == value.dtype
        and query.shape[0] == key.shape[0] == value.shape[0]
    )


def _pad_last(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
