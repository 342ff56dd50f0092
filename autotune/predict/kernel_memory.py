"""How much memory compiled kernels hold: some operators of a trace run for real, and what the process holds after them.

oneDNN's code for a matrix product depends on whether its rows fill whole blocks. What is left over takes kernels of its own,
several times as many where it is the rows that are summed over, as in the gradient of a weight. (Seen in its log and in
`VmData`: 256 KiB a kernel, 2 to 6 of them for a product whose rows fill blocks, 3 to 34 for others.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autotune.devices.procfs import process_memory
from autotune.predict.storages import Dense, KernelCall
from autotune.predict.traces import ROWS_PER_BLOCK, KernelsHeld

_FEWEST_BLOCKS = 2  # code is measured, so small tensors do


class KernelMemory:
    """Measures what the kernels of an operator hold, those of each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}

    def held(self, pairs: Iterable[tuple[KernelCall, KernelCall]], num_elements: int) -> tuple[KernelsHeld, ...]:
        """What the kernels hold that a new shape brings.

        Args:
            pairs: each operator with two shapes: of a smaller batch and of one of `num_elements` elements.
        """
        found: dict[float, list[int]] = {}
        for smaller, larger in pairs:
            rows = _sizes_that_vary(smaller, larger)
            if not rows:
                continue
            first = min(rows)
            blocks = max(_FEWEST_BLOCKS, -(-first // ROWS_PER_BLOCK))
            held = found.setdefault(rows[first] / num_elements, [0, 0])
            for position, target in enumerate((blocks * ROWS_PER_BLOCK, blocks * ROWS_PER_BLOCK + 1)):
                held[position] += self._bytes(smaller, {size: round(size * target / first) for size in rows})
        return tuple(
            KernelsHeld(rows_per_element=rows, filled_bytes=filled, other_bytes=other)
            for rows, (filled, other) in found.items()
        )

    def _bytes(self, call: KernelCall, sizes: Mapping[int, int]) -> int:
        args = tuple(_resized(arg, sizes) for arg in call.args)
        key = (call.operator, repr(args))
        if key not in self._known:
            # two blocks more first: the heap then has room for the tensors, and what it grows by are the kernels
            more = {size: new + 2 * ROWS_PER_BLOCK * new // min(sizes.values()) for size, new in sizes.items()}
            _run(call.operator, tuple(_resized(arg, more) for arg in call.args))
            self._known[key] = _run(call.operator, args)
        return self._known[key]


def _run(operator: Any, args: tuple[Any, ...]) -> int:
    """Run an operator on tensors of no particular value; bytes that the process holds more after it."""
    real = tuple(arg.empty() if isinstance(arg, Dense) else arg for arg in args)
    before_bytes = process_memory().data_bytes
    with torch.no_grad():
        operator(*real)
    return max(0, process_memory().data_bytes - before_bytes)


def _sizes_that_vary(smaller: KernelCall, larger: KernelCall) -> dict[int, int]:
    """Sizes of the smaller call's tensors that go with the batch -> what they are in the larger one."""
    pairs = [(a, b) for a, b in zip(smaller.args, larger.args, strict=True) if isinstance(a, Dense)]
    return {size: other for a, b in pairs for size, other in zip(a.shape, b.shape, strict=True) if size != other}


def _resized(arg: Any, sizes: Mapping[int, int]) -> Any:
    if not isinstance(arg, Dense):
        return arg
    return Dense(tuple(sizes.get(size, size) for size in arg.shape), arg.order, arg.dtype)
