"""How much more memory a long training takes than a run that was measured: libraries keep something for each shape of a micro batch."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any

from autotune.devices import Device
from autotune.probe.kernel_cache import cache_capacity, num_kernels_made
from autotune.probe.shapes import Held, Shapes, are_enough, growth_per_shape, growth_where_it_grows
from autotune.records.config import ShapeGrowth
from autotune.session import Session
from autotune.task.batches import StepBatch
from autotune.task.samples import is_stream
from autotune.units import MIB

NUM_SMALL = 10  # batches that are trained where too few whole ones were to see memory grow
SMALL_S = 0.5  # for all of them
LONGER_SMALL_S = 2.0  # where they take longer for their size, and are enough by then to tell a trend
LONGEST_SMALL_S = 4.0  # however few they are
MOST_DRAWN = 3 * NUM_SMALL  # those of a shape that was seen before are not trained
NUM_LOOKED_AT = 3  # small batches that are drawn where all whole ones had one shape: small ones may still differ
NUM_WHOLE = 2  # whole batches of new shapes that are trained, once small ones have shown that memory grows
WHOLE_S = 2.0  # for them, the first one apart
LOOK_S = 1.0  # for the shapes of batches that are yet to come
MOST_LOOKED_AT = 1000
NUM_COUNTED = 3  # batches of new shapes whose kernels are counted
COUNT_S = 1.0  # for them
MOST_KERNEL_BYTES = 8 * MIB  # a kernel took 1.6 MiB, also of the heap around it; where more is kept, other things are
FULL = 2  # times as many kernels as are kept: where memory still grows then, it is not by them
# What a full cache takes, in relation to what its kernels took at first: 1.26 of it in a net over graphs, after ten times as many.
FRAGMENTED = 1.3


@dataclass
class LongRun:
    """Watches memory over the micro batches of one run.

    Attributes:
        train: takes a forward and a backward pass, and leaves no gradient.
        seed: of the small batches that are drawn.
        shapes: of the run's micro batches.
    """

    session: Session
    device: Device
    train: Callable[[StepBatch], None]
    seed: int
    shapes: Shapes = field(default_factory=Shapes)
    _peak_bytes: int = 0
    _num_shapes_at_peak: int = 0
    _held: list[Held] = field(default_factory=list)
    _made: list[int] = field(default_factory=list)  # kernels for whole micro batches of new shapes

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def look(self) -> None:
        """Note how much memory is kept now, and what it was at its peak."""
        self._note_kept()
        if (peak_bytes := self.device.peak_bytes()) > self._peak_bytes:
            self._peak_bytes, self._num_shapes_at_peak = peak_bytes, self.shapes.num_trained

    def growth(
        self, whole: Iterable[StepBatch], small_size: int | None, known: ShapeGrowth | None = None
    ) -> ShapeGrowth | None:
        """By how much memory grows with each new shape of a micro batch; 0 unless it clearly grows, None where that cannot be told.

        Where the batches were too few to tell, small ones are trained, which have more lengths in less time. They also take less for
        each shape, in the worst case by the ratio of the samples. Whole ones show how much they take, so some more of them are trained
        then. A few whole ones may all have the widest shape that there is, where small ones differ.

        Args:
            whole: more micro batches of the run's own size.
            small_size: samples of a small batch; None where none is trained.
            known: what earlier processes have told; it counts where this one's own micro batches were too few.
        """
        if self.device.capabilities.own_memory:
            return None  # a device's allocator holds more than is in use, so what is in use says nothing of its peak
        if (found := growth_per_shape(self._held)) is not None:
            return ShapeGrowth(bytes_per_shape=found, most_bytes=None if known is None else known.most_bytes)
        if known is not None or small_size is None:
            return known
        if not self.shapes.are_several and not self._small_ones_differ(small_size):
            return ShapeGrowth(bytes_per_shape=0.0)
        before_bytes = self.device.kept_bytes()
        if (of_small := self._growth_of_small(small_size)) is None:
            return None
        if of_small and small_size < self.session.config.batch_size:  # else the small ones were whole
            self._train_whole(whole, self.device.kept_bytes() - before_bytes)
        most = of_small * self.session.config.batch_size / small_size
        return ShapeGrowth(bytes_per_shape=min(most, max(of_small, growth_where_it_grows(self._held))))

    def small_size(self, micro_s: float) -> int | None:
        """So many samples that `NUM_SMALL` batches of them take `SMALL_S`; no more than a micro batch has, and at least two of them.

        Args:
            micro_s: seconds of a micro step.

        Returns:
            None where such batches cannot be drawn.
        """
        task, size = self.session.task, self.session.config.batch_size
        if task.takes_whole_steps or task.dataset() is None or is_stream(task.dataset()) or task.dataset_size() is None:
            return None
        return max(min(2, size), min(size, int(size * SMALL_S / (NUM_SMALL * micro_s))))

    def draw(self, size: int) -> StepBatch:
        """A micro batch of so many samples that are drawn at random."""
        positions = self._chance.sample(range(self.session.task.dataset_size() or 0), size)
        return StepBatch([(self.session.task.batch_of(positions), size)])

    def expect(
        self,
        growth: ShapeGrowth,
        *,
        is_known: bool,
        num_shapes: float,
        countable: Iterable[StepBatch],
        micro_batches: Iterable[tuple[Any, int]],
    ) -> tuple[ShapeGrowth, float, int]:
        """What a whole training keeps.

        Args:
            growth: what `growth` told.
            is_known: whether earlier processes have told it; then they have told where it ends, too.
            num_shapes: different shapes that training meets, as earlier processes told; 0 where that is not known.
            countable: micro batches whose kernels may be counted.
            micro_batches: more of the run's; they are loaded for their shapes alone.

        Returns:
            The growth with its end, how many shapes training meets, and the bytes by which the peak grows.
        """
        if not is_known:
            # fewer shapes to come than were seen hardly fill a cache that is not full by now
            are_many = (num_shapes or self.shapes.num_expected()) > 2 * self.shapes.num_seen
            most_bytes = self._most_cached_bytes(growth.bytes_per_shape, countable if are_many else ())
            growth = replace(growth, most_bytes=most_bytes)
        num_shapes = max(num_shapes, self.shapes.num_seen) if num_shapes else self._num_shapes_expected(micro_batches)
        grown_bytes = max(0.0, num_shapes - self._num_shapes_at_peak) * growth.bytes_per_shape
        if growth.most_bytes is not None:
            grown_bytes = min(grown_bytes, growth.most_bytes)
        return growth, num_shapes, round(grown_bytes)

    def _num_shapes_expected(self, micro_batches: Iterable[tuple[Any, int]]) -> float:
        """How many shapes training will meet in all, by some more micro batches."""
        ends_s = time.perf_counter() + LOOK_S
        with contextlib.suppress(Exception):  # the user's dataset may end or fail
            for micro, _ in islice(micro_batches, MOST_LOOKED_AT):
                self.shapes.note(micro)
                if time.perf_counter() > ends_s:
                    break
        return self.shapes.num_expected()

    def _most_cached_bytes(self, per_shape: float, whole: Iterable[StepBatch]) -> float | None:
        """What memory grows by until oneDNN's cache of kernels is full; None where that is not known, or kernels are not what grows.

        Unless kernels were counted before, micro batches of a new shape are trained for that.
        """
        num_seen, ends_s = self.shapes.num_seen, time.perf_counter() + COUNT_S
        with contextlib.suppress(Exception):  # memory may run out, say
            for batch in () if self._made else islice(whole, MOST_DRAWN):
                if self.shapes.num_seen > num_seen:
                    num_seen = self.shapes.num_seen
                    self._made.append(num_kernels_made(partial(self.train, batch)))
                if len(self._made) == NUM_COUNTED or time.perf_counter() > ends_s:
                    break
        capacity, each = cache_capacity(), fmean(self._made) if self._made else 0.0
        if not capacity or not each or per_shape > each * MOST_KERNEL_BYTES or num_seen * each > FULL * capacity:
            return None
        return FRAGMENTED * per_shape * capacity / each

    def _note_kept(self, small_bytes: int = 0) -> None:
        """Note it without what small batches left, whose shapes are not among those of the run."""
        self._held.append(Held(self.shapes.num_trained, self.device.kept_bytes() - small_bytes))

    def _small_ones_differ(self, size: int | None) -> bool:
        """Whether batches of so few samples have several shapes; False where they have as many samples as those of the run."""
        if size is None or size >= self.session.config.batch_size:
            return False
        shapes, ends_s = Shapes(), time.perf_counter() + LOOK_S
        with contextlib.suppress(Exception):  # of the user's dataset
            for _ in range(NUM_LOOKED_AT):
                shapes.note(self.draw(size)[0])
                if time.perf_counter() > ends_s:
                    break
        return shapes.are_several

    def _growth_of_small(self, size: int) -> float | None:
        """Bytes by which memory grows with each new shape of small batches; 0 unless it clearly grows, None where too few tell that."""
        shapes = self.shapes if size == self.session.config.batch_size else Shapes()
        held, began_s = list[Held](), time.perf_counter()
        try:
            for _ in range(MOST_DRAWN):
                batch = self.draw(size)
                if shapes.note(batch[0]):
                    self.train(batch)
                    held.append(Held(shapes.num_seen, self.device.kept_bytes()))
                most_s = LONGER_SMALL_S if are_enough(held) else LONGEST_SMALL_S
                if len(held) == NUM_SMALL or time.perf_counter() - began_s > most_s:
                    break
        except Exception as error:  # of the user's dataset, say
            return growth_where_it_grows(held) if self.device.is_out_of_memory(error) else None
        return growth_per_shape(held)

    def _train_whole(self, batches: Iterable[StepBatch], small_bytes: int) -> None:
        """Train micro batches of the run's own size until a few of them had a new shape.

        Args:
            small_bytes: what small batches left.
        """
        ends_s, num_before = time.perf_counter() + WHOLE_S, self.shapes.num_trained
        with contextlib.suppress(Exception):  # memory may run out, say: what was seen until then tells the growth
            for batch in islice(batches, MOST_DRAWN):
                if self.shapes.num_trained > num_before + len(self._made):
                    self._made.append(num_kernels_made(partial(self.train, batch)))
                    self._note_kept(small_bytes)
                if len(self._made) == NUM_WHOLE or time.perf_counter() > ends_s:
                    break
