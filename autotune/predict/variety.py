"""How many shapes the batches of a training set have: one, or nearly as many as there are batches."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.batches import tensors

if TYPE_CHECKING:
    from autotune.task import Task

MAX_SAMPLING_S = 1.0
NUM_SAMPLED = 2048
MAX_BATCHES = 2000  # of a longer epoch; more of them bring few shapes that are new


@dataclass(frozen=True, kw_only=True)
class Variety:
    """Widths that samples have in a batch.

    Attributes:
        counts: how many of the samples looked at have each width, in increasing order of the widths.
        num_samples: in an epoch.
    """

    counts: tuple[int, ...]
    num_samples: int

    def num_shapes(self, batch_size: int) -> float:
        """Different shapes to be expected among the micro batches of one epoch, which are as wide as their widest sample.

        Samples are drawn at random, so the widest of `b` is at most as wide as a share `F` of all samples with probability
        `F^b`; each width comes up in `n` batches with probability `1 - (1 - p)^n`.
        """
        at_most = np.cumsum(self.counts) / sum(self.counts)
        chances = np.diff(at_most**batch_size, prepend=0.0)
        num_batches = min(MAX_BATCHES, max(1, self.num_samples // batch_size))
        return float((1 - (1 - chances) ** num_batches).sum())

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Variety:
        """Rebuild from plain data, after JSON."""
        return Variety(counts=tuple(data["counts"]), num_samples=data["num_samples"])


def variety_of(task: Task) -> Variety | None:
    """The widths of samples of the task's training set, each put through its collate function alone, within 1 s.

    None without a training set of known size, and where a single sample makes no batch.
    """
    from torch.utils.data import IterableDataset, default_collate

    dataset = task.dataset()
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    deadline = time.monotonic() + MAX_SAMPLING_S
    collate = task.collate_fn or default_collate
    widths: Counter[int] = Counter()
    for position in random.Random(0).sample(range(len(dataset)), min(len(dataset), NUM_SAMPLED)):
        try:
            batch = collate([dataset[position]])
        except Exception:  # user's code, for a batch that it was not made for
            return None
        widths[sum(tensor.numel() for tensor in tensors(batch))] += 1
        if time.monotonic() > deadline:
            break
    return Variety(counts=tuple(count for _, count in sorted(widths.items())), num_samples=len(dataset))
