"""The shapes of a run's micro batches: how many have occurred, and how many are still to come."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from autotune.task.adapters import leaves

NUM_LEAVES = 16  # of a batch: lists of thousands of numbers would take milliseconds


class Shapes:
    """Counts micro batches by their shape: that of each tensor in them."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[object, ...]] = Counter()

    def note(self, micro_batch: Any) -> None:
        """Count a micro batch. It takes microseconds, as it lies within what is timed."""
        self._counts[tuple(getattr(part, "shape", None) for part in islice(leaves(micro_batch), NUM_LEAVES))] += 1

    @property
    def num_seen(self) -> int:
        """Different shapes so far."""
        return len(self._counts)

    def num_expected(self) -> float:
        """Different shapes of all micro batches that may come, those that were seen included.

        It is estimated from those that were seen once and twice: where many were seen once, many were not seen at all.

        Source: the bias-corrected form of Chao, Nonparametric estimation of the number of classes in a population,
        Scandinavian Journal of Statistics 11, 1984. It is a lower bound.
        """
        times = Counter(self._counts.values())
        return self.num_seen + times[1] * (times[1] - 1) / (2 * (times[2] + 1))
