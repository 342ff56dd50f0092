"""The micro batches that a run takes, and how long training waits at the start of each pass over the training set.

Where data workers load, they are started for each pass, or told to go on, and load the first batch while training has nothing to do. A
probe takes so few batches that a pass seldom starts in it, but training over a small training set starts one every second or two.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import torch

from autotune.coupling.buffers import version_of
from autotune.devices import capabilities_of
from autotune.errors import TaskError
from autotune.session import Session
from autotune.task.batches import fresh_copy, map_tensors, num_bytes, tensors
from autotune.units import GIB, plural

NUM_PREPARED = 4  # micro batches made ahead of the timing where there is no dataset
PREPARED_BYTES = GIB  # at most so much host memory for them all, unless a single one takes more
PREPARED_S = 0.5  # at most so long for making them all, unless a single one takes longer
SHARE = 0.005  # a wait that is a smaller share of a pass is not measured
LONGEST_S = 2.0  # a wait that took longer the first time is not measured: that would take the time of several probes
TIMEOUT_S = 10  # for a batch, while a wait is measured


class TooFewSamplesError(TaskError):
    """A pass over the training set gives no batch as large as the config's."""


class MicroBatches:
    """Full micro batches without end, each with its size.

    They come from the data loader if there is a dataset, so that loading is timed; else prepared micro batches are repeated.

    Attributes:
        num_starts: passes that were started, without the first one.
        waited_s: seconds that were waited at those starts, beyond what is waited for any batch.
        untimed_s: seconds that were spent on what training does not do: on loading the last batch of a pass, where it is smaller and so
            left out, and on copying a batch that is taken once more.
    """

    def __init__(self, session: Session) -> None:
        self.num_starts = 0
        self.waited_s = 0.0
        self.untimed_s = 0.0
        self._session, self._loader = session, session.loader
        self._batches = self._prepared() if session.task.dataset() is None else self._loaded()
        self._first_s: float | None = None  # waited for the first batch of all
        self._others_s: list[float] = []  # waited for each batch, without the first of a pass where data workers load

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return self

    def __next__(self) -> tuple[Any, int]:
        started_s, untimed_before_s = time.perf_counter(), self.untimed_s
        batch, is_first = next(self._batches)
        waited_s = time.perf_counter() - started_s - (self.untimed_s - untimed_before_s)
        if not is_first or not self._loader.num_workers:
            self._others_s.append(waited_s)
        elif self._first_s is None:
            self._first_s = waited_s
        else:
            self.num_starts += 1
            self.waited_s += self._beyond_usual(waited_s)
        return batch

    @property
    def usual_wait_s(self) -> float:
        """Seconds that training waits for most batches: for their loading, where it loads them itself."""
        return median(self._others_s) if self._others_s else 0.0

    @property
    def longest_load_s(self) -> float:
        """Seconds within which a data worker surely loads a batch: those waited for the first one, in which it was started, too."""
        return self._first_s or 0.0

    def surely_keep_up(self, micro_s: float) -> bool:
        """Whether training surely never waits for data workers; True where it has none.

        Args:
            micro_s: seconds of a micro step.
        """
        num_workers = self._loader.num_workers
        return not num_workers or self.longest_load_s <= num_workers * micro_s

    def start_wait_s(self, samples_per_s: float, *, may_measure: bool) -> float:
        """Seconds that training waits at the start of a pass, beyond what it waits for any batch.

        0 where training itself loads, for a stream, and where it is nothing beside a pass or is not known.

        Args:
            samples_per_s: the speed within a pass, of all processes together.
            may_measure: whether there is time to start passes for this alone, where none has started by now.
        """
        num_samples = self._loader.num_samples
        if not self._loader.num_workers or num_samples is None or self._first_s is None:
            return 0.0
        if self.num_starts:
            return self.waited_s / self.num_starts
        matters = SHARE * num_samples < self._first_s * samples_per_s
        if may_measure and matters and self._first_s <= LONGEST_S:
            with contextlib.suppress(Exception):  # a limit allows no more workers beside those that are there, say
                return self._beyond_usual(self._next_start_s())
        return 0.0

    def _next_start_s(self) -> float:
        """Seconds from the last batch of a pass to the first of the next one, with a batch for each worker in a pass."""
        loader = self._loader.loader_of_first(self._loader.num_workers, timeout_s=TIMEOUT_S)
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        started_s = time.perf_counter()
        next(batches, None)  # ends the pass, and with it workers that do not persist
        following = iter(loader)
        next(following)
        return time.perf_counter() - started_s

    def _beyond_usual(self, waited_s: float) -> float:
        return max(0.0, waited_s - fmean(self._others_s or [0.0]))

    def _loaded(self) -> Iterator[tuple[tuple[Any, int], bool]]:
        """Micro batches of a dataset with their sizes, and whether each is the first of a pass."""
        size, found = self._session.config.batch_size, True
        while found:
            found = False
            batches, started_s = self._loader.micro_batches(), time.perf_counter()
            for micro, num_samples in batches:
                if num_samples >= size:
                    yield (micro, num_samples), not found
                    found = True
                else:  # the last of a pass
                    self.untimed_s += time.perf_counter() - started_s
                started_s = time.perf_counter()
        raise TooFewSamplesError(
            f"a pass over train_dataset gives no batch of {plural(size, 'sample')}; expected at least one: "
            "choose a smaller batch_size, or give more data"
        )

    def _prepared(self) -> Iterator[tuple[tuple[Any, int], bool]]:
        """The prepared micro batches again and again, as copies where training changes them in place."""
        prepared = _prepare_batches(self._session)
        for micro, num_samples in itertools.cycle(prepared):
            versions = [version_of(tensor) for tensor in tensors(micro)]
            yield (micro, num_samples), False
            if versions != [version_of(tensor) for tensor in tensors(micro)]:
                break
        with self._untimed():
            prepared = _prepare_batches(self._session)
        for micro, num_samples in itertools.cycle(prepared):
            with self._untimed():
                given = fresh_copy(micro)
            yield (given, num_samples), False

    @contextlib.contextmanager
    def _untimed(self) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self.untimed_s += time.perf_counter() - started_s


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
