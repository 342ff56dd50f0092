"""Counts the work of operators: the FLOPs of matrix products and convolutions by type, and the bytes that operators read and write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from autotune.records.device import BF16, CONVOLUTION, FP16, FP32, MATMUL, Work

_aten = torch.ops.aten
_TYPES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_CONVOLUTIONS = frozenset(
    packet for packet in flop_registry if "convolution" in str(packet) or str(packet).endswith("conv")
)


def _rnn(tensor: torch.Tensor, weight: torch.Tensor, recurrent: torch.Tensor, *_: Any, **__: Any) -> int:
    """Every step multiplies by both weights."""
    return 2 * tensor.shape[0] * tensor.shape[1] * (weight.numel() + recurrent.numel())


_FORMULAS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    _aten.mkldnn_rnn_layer: _rnn,
    _aten.mkldnn_rnn_layer_backward: lambda *args, **_: 2 * _rnn(*args),
}


_COLLECTIVES = {
    "allreduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "allgather": "all-gather",
    "broadcast": "broadcast",
}


def count(work: Work, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Add an operator to the work. One that only makes a view of a tensor does no work."""
    if func.is_view:
        return
    work.num_operators += 1
    if func.namespace == "c10d":
        name = next((name for part, name in _COLLECTIVES.items() if part in func.__name__), func.__name__)
        whole = max(sum(tensor.numel() * tensor.element_size() for tensor in _tensors((given,))) for given in args)
        work.wire_bytes[name] = work.wire_bytes.get(name, 0.0) + whole
    read = list(_tensors(args))
    moved_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*read, *_tensors((result,))))
    work.moved_bytes += moved_bytes
    formula = _FORMULAS.get(func.overloadpacket)
    if formula is None:
        work.plain_bytes += moved_bytes
        return
    kind = CONVOLUTION if func.overloadpacket in _CONVOLUTIONS else MATMUL
    arithmetic = next((_TYPES[tensor.dtype] for tensor in reversed(read) if tensor.dtype in _TYPES), FP32)
    with contextlib.suppress(Exception):  # torch's formulas are made for dense operands
        flops = float(formula(*args, **kwargs, out_val=result))
        work.flops[kind, arithmetic] = work.flops.get((kind, arithmetic), 0.0) + flops


class WorkCounter(TorchDispatchMode):
    """Counts the work of all operators that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count(self.work, func, args, kwargs or {}, result)
        return result


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
