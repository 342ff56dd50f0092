"""How much memory the kernels hold that a library compiles for one more shape.

oneDNN's code for a matrix product depends on whether its rows fill whole blocks. What is left over takes kernels of its own,
several times as many where it is the rows that are summed over, as in the gradient of a weight. (Seen in its log and in
`VmData`: 256 KiB a piece of code, 2 to 6 of them for a product whose rows fill blocks, 3 to 34 for others, and some 600 KiB
beside them.) So small products are run for real, and what the process holds more after them is measured. Other operators
depend little on the shape, and are taken as what was measured of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autotune.devices.procfs import process_memory
from autotune.predict.storages import Dense, KernelCall, KernelPair
from autotune.predict.traces import ROWS_PER_BLOCK, KernelsHeld
from autotune.units import MIB

_aten = torch.ops.aten

_FEWEST_BLOCKS = 2
_LARGEST_BYTES = 32 * MIB  # of a product's tensors
_LARGEST_FLOPS = 2e9

_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
_RECURRENT = frozenset({_aten.mkldnn_rnn_layer.default, _aten.mkldnn_rnn_layer_backward.default})
# Bytes of a kernel in float32 and in short types, on a processor with AMX: layers of 16 to 48 channels, 20 lengths
_CONVOLUTION_BYTES = (0.5 * MIB, 1.2 * MIB)
_RECURRENT_BYTES = (1.0 * MIB, 5.0 * MIB)
_PRODUCT_BYTES = (1.4 * MIB, 3.4 * MIB)  # in short types: of rows that fill blocks, of others


class KernelMemory:
    """What kernels hold: measured, those of each operator once, or typical."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    @staticmethod
    def is_measurable(pairs: Iterable[KernelPair]) -> bool:
        """Whether any of the operators can be run to see what its kernels hold."""
        return any(first.operator in _PRODUCTS for first, _ in pairs)

    def typical(self, pairs: Iterable[KernelPair], num_elements: int) -> tuple[KernelsHeld, ...]:
        """What the kernels for one more shape typically hold, without running anything.

        Args:
            num_elements: of the larger batch.
        """
        return _held(pairs, num_elements, lambda pair: _typical_bytes(pair[0]))

    def measured(self, pairs: Iterable[KernelPair], num_elements: int) -> tuple[KernelsHeld, ...]:
        """The same, with small products run for real."""
        return _held(pairs, num_elements, lambda pair: self._of_product(pair) or _typical_bytes(pair[0]))

    def _of_product(self, pair: KernelPair) -> tuple[float, float] | None:
        """Bytes where the rows fill blocks and where they do not; None where that cannot be run."""
        if pair[0].operator not in _PRODUCTS:
            return None
        blocks = max(_FEWEST_BLOCKS, -(-_rows(pair)[0] // ROWS_PER_BLOCK))
        while blocks > _FEWEST_BLOCKS and not _is_small(_with_rows(pair, (blocks + 2) * ROWS_PER_BLOCK)):
            blocks = max(_FEWEST_BLOCKS, blocks // 2)
        if not _is_small(_with_rows(pair, (blocks + 2) * ROWS_PER_BLOCK)):
            return None
        try:
            filled, other = (self._bytes(pair, blocks * ROWS_PER_BLOCK + left_over) for left_over in (0, 1))
        except (RuntimeError, ValueError):  # sizes that do not go together unless they are the model's
            return None
        return filled, other

    def _bytes(self, pair: KernelPair, rows: int) -> int:
        args = _with_rows(pair, rows)
        key = (pair[0].operator, repr(args))
        if key not in self._known:
            # a larger one first: the heap then has room for the tensors, and what it grows by are the kernels
            _run(pair[0].operator, _with_rows(pair, rows + 2 * ROWS_PER_BLOCK))
            self._known[key] = _run(pair[0].operator, args)
        return self._known[key]


def _held(
    pairs: Iterable[KernelPair], num_elements: int, bytes_of: Callable[[KernelPair], tuple[float, float]]
) -> tuple[KernelsHeld, ...]:
    found: dict[float, list[float]] = {}
    for pair in filter(_varying_sizes, pairs):
        held = found.setdefault(_rows(pair)[1] / num_elements, [0.0, 0.0])
        for position, size_bytes in enumerate(bytes_of(pair)):
            held[position] += size_bytes
    return tuple(
        KernelsHeld(rows_per_element=rows, filled_bytes=round(filled), other_bytes=round(other))
        for rows, (filled, other) in found.items()
    )


def _typical_bytes(call: KernelCall) -> tuple[float, float]:
    """Bytes where rows fill blocks, and where they do not."""
    if call.operator in _PRODUCTS:
        return _PRODUCT_BYTES
    in_full, in_short = _RECURRENT_BYTES if call.operator in _RECURRENT else _CONVOLUTION_BYTES
    dtype = next(arg.dtype for arg in call.args if isinstance(arg, Dense))
    each = (in_full if dtype is torch.float32 else in_short) * len(call.kernels)
    return each, each


def _varying_sizes(pair: KernelPair) -> list[tuple[int, int]]:
    """Sizes of tensors that go with the batch, in both calls."""
    tensors = [(a, b) for a, b in zip(pair[0].args, pair[1].args, strict=True) if isinstance(a, Dense)]
    return [(x, y) for a, b in tensors for x, y in zip(a.shape, b.shape, strict=True) if x != y]


def _rows(pair: KernelPair) -> tuple[int, int]:
    """The smallest size that goes with the batch, in both calls."""
    return min(_varying_sizes(pair))


def _with_rows(pair: KernelPair, rows: int) -> tuple[Any, ...]:
    """The arguments with so many rows, and all else that goes with the batch in proportion."""
    scale = rows / _rows(pair)[0]
    return tuple(
        Dense(tuple(x if x == y else round(x * scale) for x, y in zip(a.shape, b.shape, strict=True)), a.order, a.dtype)
        if isinstance(a, Dense)
        else a
        for a, b in zip(pair[0].args, pair[1].args, strict=True)
    )


def _is_small(args: tuple[Any, ...]) -> bool:
    """Whether a product takes little time and memory."""
    left, right = args[-2:]
    columns = right.shape[-1]
    elements = math.prod(left.shape) + math.prod(right.shape) + math.prod(left.shape[:-1]) * columns
    flops = 2.0 * math.prod(left.shape) * columns
    return bool(elements * left.dtype.itemsize <= _LARGEST_BYTES and flops <= _LARGEST_FLOPS)


def _run(operator: Any, args: tuple[Any, ...]) -> int:
    """Run an operator on tensors of no particular value; bytes that the process holds more after it."""
    real = tuple(arg.empty() if isinstance(arg, Dense) else arg for arg in args)
    before_bytes = process_memory().data_bytes
    with torch.no_grad():
        operator(*real)
    return max(0, process_memory().data_bytes - before_bytes)
