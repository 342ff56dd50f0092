"""The micro batches that a run takes, and what it costs to begin each pass over the training set.

Where data workers load, a pass begins with a wait: workers are started, or told to go on, and load the first batch while training has
nothing to do. A probe takes so few batches that a pass seldom ends in it. Training ends one each second or two where the training set is
small, which takes one of the benchmarks' models 8 % of its speed. So the timed blocks leave out a beginning that falls into them, and its
share is added to the time of every sample.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import torch

from autotune.devices import capabilities_of
from autotune.errors import TaskError
from autotune.session import Session
from autotune.task.batches import map_tensors, num_bytes, tensors
from autotune.units import GIB, plural

NUM_PREPARED = 4  # micro batches made ahead of the timing where there is no dataset
PREPARED_BYTES = GIB  # at most so much host memory for them all, unless a single one takes more
PREPARED_S = 0.5  # at most so long for making them all, unless a single one takes longer
SHARE = 0.005  # of a pass that its beginning takes at least, for it to be measured
LONGEST_S = 2.0  # a first beginning that takes longer stands for the later ones


class TooFewSamplesError(TaskError):
    """A pass over the training set gives no batch as large as the config's."""


class MicroBatches:
    """Full micro batches without end, each with its size.

    They come from the data loader if there is a dataset, so that loading is timed; else prepared micro batches are repeated.

    Attributes:
        beginnings_s: seconds that were waited for the first batches of passes, beyond what is waited for any batch; those of the first
            pass are not among them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loader = session.loader
        self.beginnings_s = 0.0
        self._begins = False  # whether the batch that was taken last is the first of a pass
        self._first_s = 0.0  # waited for the first batch of all
        self._later_s: list[float] = []  # for the first ones of later passes
        self._waits_s: list[float] = []  # for all others
        self._batches = self._passes()

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return self

    def __next__(self) -> tuple[Any, int]:
        started_s = time.perf_counter()
        batch = next(self._batches)
        waited_s = time.perf_counter() - started_s
        if not self._begins:
            self._waits_s.append(waited_s)
        elif not self._first_s:
            self._first_s = waited_s
        else:
            self._later_s.append(self._beyond_usual(waited_s))
            self.beginnings_s += self._later_s[-1]
        self._begins = False
        return batch

    def beginning_s(self, samples_per_s: float) -> float:
        """Seconds that training waits when a pass begins, beyond what it waits for any batch.

        0 where a pass takes so long that this is nothing beside it, where training itself loads, and for a stream.

        Args:
            samples_per_s: the speed within a pass.
        """
        if not self._loader.num_workers or self._loader.num_samples is None:
            return 0.0
        if self._later_s:
            return fmean(self._later_s)
        if self._first_s * samples_per_s < SHARE * self._loader.num_samples:
            return 0.0
        turn_s = self._first_s
        if turn_s <= LONGEST_S:
            with contextlib.suppress(Exception):  # a limit allows no more workers beside those that are there, say
                turn_s = self._turn_s()
        return self._beyond_usual(turn_s)

    def _turn_s(self) -> float:
        """Seconds from the last batch of a pass to the first of the next one, with a batch for each worker in a pass."""
        loader = self._loader.cut(self._loader.num_workers)
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        started_s = time.perf_counter()
        next(batches, None)  # ends the pass, and with it workers that do not persist
        following = iter(loader)
        next(following)
        return time.perf_counter() - started_s

    def _beyond_usual(self, waited_s: float) -> float:
        """A wait without what is waited for any batch."""
        return max(0.0, waited_s - median(self._waits_s or [0.0])) if self._loader.num_workers else 0.0

    def _passes(self) -> Iterator[tuple[Any, int]]:
        session = self._session
        if session.task.dataset() is None:
            yield from itertools.cycle(_prepare_batches(session))
        found = True
        while found:
            found = False
            for micro, num_samples in session.loader.micro_batches():
                if num_samples >= session.config.batch_size:  # the last of an epoch may be smaller
                    self._begins, found = not found, True
                    yield micro, num_samples
        raise TooFewSamplesError(
            f"a pass over train_dataset gives no batch of {plural(session.config.batch_size, 'sample')}; expected at least one: "
            "choose a smaller batch_size, or give more data"
        )


def _prepare_batches(session: Session) -> list[tuple[Any, int]]:
    """Some micro batches, fewer where they are large or take long to make.

    For a GPU they lie in page-locked memory, as from a data loader that keeps up.
    """
    batches = session.loader.micro_batches()
    started_s = time.perf_counter()
    first = next(batches)
    first_s = time.perf_counter() - started_s
    first_bytes = sum(map(num_bytes, tensors(first[0])))
    fitting, in_time = PREPARED_BYTES // max(1, first_bytes), int(min(NUM_PREPARED, PREPARED_S / max(1e-9, first_s)))
    number = max(1, min(NUM_PREPARED, fitting, in_time))
    prepared = [first, *itertools.islice(batches, number - 1)]
    if capabilities_of(session.device.type).page_locked:
        with contextlib.suppress(RuntimeError):  # the host allows no more page-locked memory
            return [(map_tensors(torch.Tensor.pin_memory, micro), size) for micro, size in prepared]
    return prepared
