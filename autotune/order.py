"""The order in which a session draws the samples of its training set: at random, and from a moment on in the order that a seed gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import RandomSampler

_LARGE = 2**17  # samples; an order of more takes too long to draw
_PIECE = 2**12  # samples; of so large a training set they are drawn with replacement, so many at once


class Order(RandomSampler):
    """Draws as torch's own sampler does, until it is told to begin again in a seed's order."""

    _next: Iterator[int] | None = None

    def begin_again(self, seed: int) -> None:
        """From here on, draw as many samples as there are, in the seed's order. The pass after that is random."""
        self._next = self._in_order(seed)

    def __iter__(self) -> Iterator[int]:
        drawn = super().__iter__()
        while True:
            if self._next is not None:
                drawn, self._next = self._next, None
            try:
                index = next(drawn)
            except StopIteration:
                return
            yield index

    def _in_order(self, seed: int) -> Iterator[int]:
        draws, number = torch.Generator().manual_seed(seed), self.num_samples
        if number <= _LARGE:
            return iter(torch.randperm(number, generator=draws).tolist())
        pieces = (min(_PIECE, number - start) for start in range(0, number, _PIECE))
        return (index for size in pieces for index in torch.randint(number, (size,), generator=draws).tolist())
