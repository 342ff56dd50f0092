"""The types of the rules for what an operator allocates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Stepped(int):
    """Bytes that do not grow linearly with the batch size. A rule computes them from figures that do (lengths and strides, say).

    Args:
        figures: the arguments of the rule.
    """

    figures: tuple[int, ...]
    rule: Callable[[tuple[int, ...]], int]

    def __new__(cls, rule: Callable[[tuple[int, ...]], int], figures: tuple[int, ...]) -> Stepped:
        """The rule's bytes for the figures."""
        size_bytes = super().__new__(cls, rule(figures))
        size_bytes.figures, size_bytes.rule = figures, rule
        return size_bytes

    def towards(self, other: Stepped, share: float) -> int:
        """Bytes at a batch size between this one (share 0) and that of `other` (share 1), or beyond; of the same operator."""
        pairs = zip(self.figures, other.figures, strict=True)
        return self.rule(tuple(round(a + share * (b - a)) for a, b in pairs))


@dataclass(frozen=True)
class Scratch:
    """What an operator allocates beside its result and frees again: sizes in bytes, in order, since both shape an allocator's holes.

    Attributes:
        before: sizes allocated before the result, and freed when the operator is done.
        early: sizes allocated after `before` and freed before the result is allocated.
        beside: sizes allocated after the result, and freed when the operator is done.
        after: sizes allocated after these, in groups; each group is freed before the next one.
    """

    before: tuple[int, ...] = ()
    early: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    after: tuple[tuple[int, ...], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that lives at once beside the result."""
        return sum(self.before) + sum(self.beside) + max(map(sum, self.after), default=0)


# (an operator's arguments, its result) -> its scratch. An allocation that some batch sizes do not need is there with 0 bytes.
Workspace = Callable[[tuple[Any, ...], Any], Scratch]
# Likewise -> tensors of the result whose storage has more bytes than it seems, or that are allocated in another order than returned.
Storages = list[tuple[torch.Tensor, int]]
ResultRule = Callable[[tuple[Any, ...], Any], Storages]


@dataclass(frozen=True)
class Hidden:
    """Memory that operators allocate and fake tensors do not show.

    Attributes:
        workspace: returns the rule of an operator, or None.
        results: the rules of operators whose results are larger than fake tensors show, or allocated in another order.
    """

    workspace: Callable[[Any], Workspace | None]
    results: Mapping[Any, ResultRule]


def size_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.nbytes


def round_up(number: int, multiple: int) -> int:
    """The next multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def copies(*tensors: Any) -> tuple[int, ...]:
    """Bytes of the copies that a kernel makes of those tensors that are not contiguous; 0 for the others."""
    return tuple(0 if each.is_contiguous() else size_bytes(each) for each in tensors if isinstance(each, torch.Tensor))


def lies_channels_last(tensor: torch.Tensor) -> bool:
    """Whether the channels lie last in memory; also true of some contiguous tensors, such as those with one channel."""
    layout = _CHANNELS_LAST.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout)
