"""How long the samples of a training set are: batches padded to their longest sample get wider as they get larger."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from autotune.task import Task

MAX_SAMPLING_S = 1.0
NUM_SAMPLED = 2048
MIN_SAMPLES = 64  # fewer do not show how unequal the others are
NUM_QUANTILES = 256
PADDED = 0.95  # share of the fully padded size that a padded batch has at least


@dataclass(frozen=True)
class LengthDistribution:
    """Elements that a sample has in a batch of its own: equally likely quantiles, in increasing order."""

    quantiles: tuple[int, ...]

    def mean_width(self, batch_size: int) -> float:
        """Expected elements per sample of a micro batch, padding up to its longest sample included.

        All of `b` samples drawn at random are among the shortest share `F` with probability `F^b`.
        """
        edges = np.linspace(0.0, 1.0, len(self.quantiles) + 1) ** batch_size
        return float(np.diff(edges) @ np.array(self.quantiles, dtype=float))


def sample_lengths(task: Task) -> LengthDistribution | None:
    """Sample lengths of the task's training set, each sample put through the collate function alone, within 1 s.

    Returns:
        None without a training set of known size, where samples are too slow to look at, where a single sample makes no
        batch, and where the collate function does not pad to the longest.

    Raises:
        Exception: what the user's dataset or collate function raises.
    """
    from torch.utils.data import IterableDataset, default_collate

    from autotune.task.batches import tensors

    dataset = task.dataset()
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    collate = task.collate_fn or default_collate

    def width_of(*indices: int) -> int:
        return sum(tensor.numel() for tensor in tensors(collate([dataset[index] for index in indices])))

    num_samples = len(dataset)
    deadline = time.monotonic() + MAX_SAMPLING_S
    found: list[tuple[int, int]] = []  # (width, index)
    for index in random.Random(0).sample(range(num_samples), min(num_samples, NUM_SAMPLED)):
        found.append((width_of(index), index))
        if time.monotonic() > deadline:
            break
    found.sort()
    if len(found) < min(num_samples, MIN_SAMPLES) or not found or found[0][0] == 0:
        return None
    (shortest, one), (longest, other) = found[0], found[-1]
    if shortest < longest and width_of(one, other) < PADDED * 2 * longest:
        return None
    if shortest == longest:
        return LengthDistribution((longest,))
    places = np.linspace(0, len(found) - 1, min(len(found), NUM_QUANTILES)).round().astype(int)
    return LengthDistribution(tuple(found[place][0] for place in places))
