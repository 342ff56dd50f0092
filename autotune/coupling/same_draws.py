"""Gives the micro batches of a batch the random numbers that the batch drew for the same samples.

A diffusion model draws noise and time steps for each sample, mixup one factor for all. The loss of the whole batch and that of its
micro batches can be compared only where each sample gets the same draws both times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_RETURNED = {
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "bernoulli", "multinomial",
    "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "exponential", "uniform", "log_normal", "geometric",
}  # fmt: skip
_IN_PLACE = {
    "normal_", "uniform_", "exponential_", "random_", "bernoulli_", "geometric_", "cauchy_", "log_normal_",
}  # fmt: skip


@dataclass(frozen=True)
class _Drawn:
    name: str
    among: tuple[Any, ...]
    values: torch.Tensor


class SameDraws(TorchDispatchMode):
    """Notes what a whole batch draws, and lets each of its micro batches draw the rows of its samples.

    Args:
        blocked: where a draw has several rows for each sample, they lie one whole batch after the other (views that were
            concatenated), and not side by side.

    Attributes:
        among_samples: something was drawn among the samples of the batch: a permutation of them, say, or partners.
        unlike: a micro batch drew something for which the whole batch drew nothing alike.
        several_rows: some draw had several rows for each sample, for which `blocked` counts.
    """

    def __init__(self, *, blocked: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocked = blocked
        self._drawn: list[_Drawn] = []
        self._part: tuple[int, int, int] | None = (
            None  # first sample, the one behind the last, samples of the whole batch
        )
        self._position = 0
        self.among_samples = self.unlike = self.several_rows = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around the forward and backward pass of the whole batch."""
        self._drawn.clear()
        self._part = None
        with self:
            yield

    @contextmanager
    def part(self, start: int, stop: int, num_samples: int) -> Iterator[None]:
        """Around those of the samples from `start` to `stop` of `num_samples`."""
        self._part, self._position = (start, stop, num_samples), 0
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _RETURNED and name not in _IN_PLACE:
            return found
        among = _among(name, args)
        if self._part is None:
            self._drawn.append(_Drawn(name, among, found.clone()))
            return found
        values = self._same(name, among, found)
        if values is None:
            return found
        return found.copy_(values) if name in _IN_PLACE else values.clone()

    def _same(self, name: str, among: tuple[Any, ...], found: torch.Tensor) -> torch.Tensor | None:
        """What the whole batch drew for these samples; None where it drew nothing alike."""
        assert self._part is not None
        self._position += 1
        drawn = self._drawn[self._position - 1] if self._position <= len(self._drawn) else None
        if drawn is None or drawn.name != name or drawn.values.dim() != found.dim():
            self.unlike = True
            return None
        if drawn.among != among:
            self.among_samples = True
            return None
        start, stop, num_samples = self._part
        unequal = [dim for dim in range(found.dim()) if found.size(dim) != drawn.values.size(dim)]
        if not unequal:
            return drawn.values
        dim, rows = unequal[0], drawn.values.size(unequal[0]) // num_samples
        if len(unequal) > 1 or drawn.values.size(dim) != rows * num_samples or found.size(dim) != rows * (stop - start):
            self.unlike = True
            return None
        if rows == 1 or not self._blocked:
            self.several_rows = self.several_rows or rows > 1
            return drawn.values.narrow(dim, start * rows, (stop - start) * rows)
        blocks = [drawn.values.narrow(dim, block * num_samples + start, stop - start) for block in range(rows)]
        return torch.cat(blocks, dim)


def _among(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """The numbers between which something is drawn, and other parameters of the distribution, without its shape."""
    sizes = tuple(args[0].shape[-1:]) if name == "multinomial" else ()
    return (*(arg for arg in args if isinstance(arg, Number)), *sizes)
