"""How wide the batches of a training set are, padded to their widest sample, and how many shapes they have."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.predict.array import Array
from autotune.task.batches import tensors

if TYPE_CHECKING:
    from autotune.task import Task

MAX_SAMPLING_S = 1.0
NUM_SAMPLED = 2048
FEWEST_SAMPLES = 64  # say nothing of how unequal the others are
PADDED = 0.95  # of the size with all padding: the least that a padded batch has
MAX_BATCHES = 2000  # of a longer epoch; of lines cut at some length, more of them bring few shapes that are new


@dataclass(frozen=True, kw_only=True)
class Variety:
    """Widths that samples have in a batch.

    Attributes:
        widths: elements of a sample in a batch, padding of its own included, in increasing order.
        counts: how many of the samples looked at have each of them.
        num_samples: in an epoch.
    """

    widths: tuple[int, ...]
    counts: tuple[int, ...]
    num_samples: int

    def shapes(self, batch_size: int) -> tuple[Array, Array]:
        """Widths of a batch, and the probability of each that some of an epoch's micro batches have it.

        Each width comes up in `n` of them with probability `1 - (1 - p)^n`.
        """
        number = min(MAX_BATCHES, max(1, self.num_samples // batch_size))
        return np.array(self.widths, dtype=float), 1 - (1 - self._chances(batch_size)) ** number

    def num_shapes(self, batch_size: int) -> float:
        """Different shapes to be expected among the micro batches of an epoch."""
        return float(self.shapes(batch_size)[1].sum())

    def mean_width(self, batch_size: int) -> float:
        """Elements to be expected for each sample of a micro batch, with the padding up to its widest one."""
        return float(self._chances(batch_size) @ np.array(self.widths, dtype=float))

    def _chances(self, batch_size: int) -> Array:
        """Probability that a micro batch is as wide as each of the widths: as its widest sample.

        Samples are drawn at random, so all of `b` are among a share `F` of the narrowest with probability `F^b`.
        """
        return np.asarray(np.diff(self._at_most**batch_size, prepend=0.0))

    @cached_property
    def _at_most(self) -> Array:
        """Share of the samples that are no wider than each of the widths."""
        return np.cumsum(self.counts) / sum(self.counts)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Variety:
        """Rebuild from plain data, after JSON."""
        return Variety(widths=tuple(data["widths"]), counts=tuple(data["counts"]), num_samples=data["num_samples"])


def variety_of(task: Task) -> Variety | None:
    """The widths of samples of the task's training set, each put through its collate function alone.

    Samples are looked at for 1 s. None without a training set of known size; where they are so slow to come by that too
    few were seen; where a single sample makes no batch; and where the collate function does not pad to the widest.

    Raises:
        Exception: what the user's dataset or collate function raises.
    """
    from torch.utils.data import IterableDataset, default_collate

    dataset = task.dataset()
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    collate = task.collate_fn or default_collate
    num_samples = len(dataset)

    def width_of(*positions: int) -> int:
        return sum(tensor.numel() for tensor in tensors(collate([dataset[position] for position in positions])))

    deadline = time.monotonic() + MAX_SAMPLING_S
    at_width: dict[int, int] = {}  # width -> position of a sample
    widths: Counter[int] = Counter()
    for position in random.Random(0).sample(range(num_samples), min(num_samples, NUM_SAMPLED)):
        width = width_of(position)
        widths[width] += 1
        at_width[width] = position
        if time.monotonic() > deadline:
            break
    narrowest, widest = min(widths), max(widths)
    if widths.total() < min(num_samples, FEWEST_SAMPLES) or narrowest == 0:
        return None
    together = width_of(at_width[narrowest], at_width[widest])
    if narrowest < widest and together < PADDED * 2 * widest:
        return None
    found = sorted(widths.items())
    return Variety(
        widths=tuple(width for width, _ in found), counts=tuple(count for _, count in found), num_samples=num_samples
    )
