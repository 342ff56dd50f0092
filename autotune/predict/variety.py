"""How wide the batches of a training set are, padded to their widest sample, and how many shapes they have."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

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
        widths: elements of a sample in a batch, padding of its own included, in increasing order.
        counts: how many of the samples looked at have each of them.
        num_samples: in an epoch.
    """

    widths: tuple[int, ...]
    counts: tuple[int, ...]
    num_samples: int

    def num_shapes(self, batch_size: int) -> float:
        """Different shapes to be expected among the micro batches of one epoch: each width comes up in `n` batches with
        probability `1 - (1 - p)^n`.
        """
        num_batches = min(MAX_BATCHES, max(1, self.num_samples // batch_size))
        return float((1 - (1 - self._chances(batch_size)) ** num_batches).sum())

    def mean_width(self, batch_size: int) -> float:
        """Elements to be expected for each sample of a micro batch, with the padding up to its widest one."""
        return float(self._chances(batch_size) @ np.array(self.widths, dtype=float))

    def _chances(self, batch_size: int) -> NDArray[np.float64]:
        """Probability that a micro batch is as wide as each of the widths: as its widest sample.

        Samples are drawn at random, so all of `b` are among a share `F` of the narrowest with probability `F^b`.
        """
        at_most = np.cumsum(self.counts) / sum(self.counts)
        return np.asarray(np.diff(at_most**batch_size, prepend=0.0))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Variety:
        """Rebuild from plain data, after JSON."""
        return Variety(widths=tuple(data["widths"]), counts=tuple(data["counts"]), num_samples=data["num_samples"])


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
    found = sorted(widths.items())
    return Variety(
        widths=tuple(width for width, _ in found), counts=tuple(count for _, count in found), num_samples=len(dataset)
    )
