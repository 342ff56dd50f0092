"""Gives the samples that are compared, as one batch and as its two micro batches."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autotune.task import Task
from autotune.task.batches import CannotCutError, StepBatch, shapes, split

MOST_SHAPES, FEWEST_ALIKE = 128, 4  # samples that are looked at to find some of one shape, and how many must be found


@dataclass(frozen=True)
class Halves:
    """A batch of samples, and the same samples in two micro batches.

    Attributes:
        blocked: how draws with several rows for each sample lie; see `SameDraws`.
        restores_between: each part, and not only the first, begins with the buffers that the whole batch began with.
    """

    whole: Any
    parts: StepBatch
    blocked: bool = False
    restores_between: bool = False

    @property
    def num_samples(self) -> int:
        """Samples of the whole batch."""
        return sum(self.parts.sizes)

    def are_padded_anew(self) -> bool:
        """Whether some rows of samples are longer in the batch than in one of its parts."""
        for part, size in zip(self.parts, self.parts.sizes, strict=True):
            pairs = zip(shapes(self.whole), shapes(part), strict=False)
            changes = [[lengths for lengths in zip(*pair, strict=False) if len(set(lengths)) > 1] for pair in pairs]
            if any((self.num_samples, size) in changed and len(changed) > 1 for changed in changes):
                return True
        return False


class SamplesOf:
    """The first samples of a batch, as one batch and as its micro batches. Their single lengths are not known any more."""

    def __init__(self, task: Task, batch: Any) -> None:
        self._task, self._batch = task, batch

    def halves(self, num_samples: int) -> Halves:
        """So many samples. Raises CannotCutError."""
        cuts = self._task.cuts()
        whole = split(self._batch, cuts, num_samples)[0]
        return Halves(whole, split(whole, cuts, -(-num_samples // 2)))

    def collated_anew(self, halves: Halves) -> None:
        """None: micro batches are parts of the batch."""

    def of_one_shape(self, num_samples: int) -> None:
        """None: samples of one shape cannot be chosen, as single samples are not known."""


class TypicalSamples:
    """Samples of a task's training set drawn at random, or what its `make_batch` makes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        size = task.dataset_size()
        drawn = size is not None and not isinstance(task.dataset(), torch.utils.data.IterableDataset)
        self._positions = random.Random(0).sample(range(size), size) if drawn and size is not None else None

    def halves(self, num_samples: int) -> Halves:
        """So many samples. What cannot be cut is collated anew, as `Session.loader` does."""
        task = self._task
        if task.dataset() is None:
            return SamplesOf(task, task.batch(num_samples)).halves(num_samples)
        positions = self._first(num_samples)
        with contextlib.suppress(CannotCutError):
            return SamplesOf(task, task.batch_of(positions)).halves(num_samples)
        return self._collated(positions)

    def collated_anew(self, halves: Halves) -> Halves | None:
        """The same samples, whose micro batches a loader pads less than the batch; None where it does not."""
        if self._task.dataset() is None:
            return None
        positions = self._first(halves.num_samples)
        parts = self._parts(positions)  # samples may take long to read: the whole is made where it is needed
        if not Halves(halves.whole, parts).are_padded_anew():
            return None
        return Halves(self._task.batch_of(positions), parts)

    def of_one_shape(self, num_samples: int) -> Halves | None:
        """At most so many samples that have the same shapes as batches of one; None where too few are known."""
        if self._task.dataset() is None or self._positions is None:
            return None
        of_shape: dict[Any, list[int]] = {}
        for position in self._positions[:MOST_SHAPES]:
            alike = of_shape.setdefault(tuple(shapes(self._task.batch_of((position,)))), [])
            alike.append(position)
            if len(alike) == num_samples:
                break
        most = max(of_shape.values(), key=len)
        return self._collated(most) if len(most) >= FEWEST_ALIKE else None

    def _first(self, num_samples: int) -> Sequence[int]:
        return (self._positions or range(num_samples))[:num_samples]

    def _collated(self, positions: Sequence[int]) -> Halves:
        return Halves(self._task.batch_of(positions), self._parts(positions))

    def _parts(self, positions: Sequence[int]) -> StepBatch:
        size = -(-len(positions) // 2)
        return StepBatch((self._task.batch_of(part), len(part)) for part in (positions[:size], positions[size:]))


Samples = SamplesOf | TypicalSamples
