"""The order in which a session draws the samples of its training set: at random, and from a step on in an order that can be drawn again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import RandomSampler

_LARGE = 2**20  # samples; of a larger training set so many are drawn, and hardly one comes twice


class Order(RandomSampler):
    """Draws as torch's own sampler does, until it is told to begin again in an order that a seed tells."""

    _seed: int | None = None

    def begin_again(self, seed: int) -> None:
        """Let what is drawn from here on be all samples in the seed's order, whatever was drawn before. The pass after that is random.

        Data workers still give the batches that were drawn ahead for them.
        """
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        drawn = super().__iter__()
        while True:
            if self._seed is not None:
                drawn, self._seed = iter(self._in_order(self._seed)), None
            try:
                index = next(drawn)
            except StopIteration:
                return
            yield index

    def _in_order(self, seed: int) -> list[int]:
        draws, number = torch.Generator().manual_seed(seed), self.num_samples
        if number > _LARGE:
            return torch.randint(number, (_LARGE,), generator=draws).tolist()
        return torch.randperm(number, generator=draws).tolist()
