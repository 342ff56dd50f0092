"""What a trace has seen of a training step, every storage that is allocated and freed, and what follows for any batch size.

As long as the code does the same at every batch size, every storage of a training step is affine in it. Two passes then
give every storage, and the sum of the living ones after each event is a line. The peak is the upper envelope of these
lines: exact at every batch size, and checked at a third. Where passes differ in more than sizes, their peaks are taken to
lie on one line, and a third pass shows how far off that is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from autotune.prediction import Array
from autotune.prediction.traces import PeakFit, Piece, Purpose, WorkTrace
from autotune.records.device import Work

F = TypeVar("F", float, Array)
NUM_MODULES = 5
UNALIGNED_DEVIATION = 0.02  # relative, at the least, where passes differ in more than sizes


class Event(NamedTuple):
    """One storage allocated or freed.

    Attributes:
        key: the same for the allocation and the freeing of one storage, and never used again.
        size_bytes: the storage's own size, before an allocator rounds it.
        allocates: True when it is allocated, False when it is freed.
        stream: number of the stream on which it is allocated; 0 is the one on which a model computes.
    """

    key: int
    size_bytes: int
    allocates: bool
    stream: int = 0

    @property
    def change_bytes(self) -> int:
        """By which the living storages grow."""
        return self.size_bytes if self.allocates else -self.size_bytes


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over the training code: a micro batch forward and backward, or an update of the parameters.

    Attributes:
        batch_size: of the micro batch.
        held: key -> bytes of the storages that exist when it begins, in the order of their allocation.
        events: what it allocates and frees.
        purposes: key -> purpose of all storages that occur.
        modules: key of an activation -> the module in whose forward pass it was allocated.
        marks: (number of events before it, number of the block) of every moment at which one of the observed blocks begins
            its forward pass or its backward pass, or the last block ends its forward pass (with the number of blocks).
        work: of its operators; None where they were not run.
    """

    batch_size: int
    held: Mapping[int, int]
    events: tuple[Event, ...]
    purposes: Mapping[int, Purpose]
    modules: Mapping[int, str]
    marks: tuple[tuple[int, int], ...] = ()
    work: Work | None = None


@dataclass(frozen=True, kw_only=True)
class MicroSteps:
    """Micro batches, forward and backward, at several batch sizes. The optimizer has no state yet.

    Attributes:
        alone: with no gradients before it, in increasing order of the batch sizes.
        beside: of the smallest and the largest batch size a second one, beside the gradients of the first.
        before: what was allocated and freed before all of them.
        first: of the smallest and the largest batch size the micro batch that `beside` follows; None where that is as `alone`.
        spread: what follows `before` and a micro batch of which nothing is left, where the model is spread so over a world.
        regrouped: what follows the first step.
    """

    alone: tuple[Pass, ...]
    beside: tuple[Pass, ...]
    before: tuple[Event, ...]
    first: tuple[Pass, ...] | None = None
    spread: tuple[Event, ...] = ()
    regrouped: tuple[Event, ...] = ()


class Updates(NamedTuple):
    """Updates of the parameters: the first one, in which the optimizer allocates its state, and the second."""

    first: Pass
    second: Pass


def fit_peak(passes: Sequence[Pass], *, deviation: float = 0.0) -> PeakFit:
    """The peak of the same pass at any batch size.

    Args:
        passes: at two batch sizes at least, in increasing order. The first and the last are fitted, the others check it.
        deviation: relative, that is known from elsewhere.
    """
    low, *between, high = map(_Series, passes)
    if are_aligned(*passes):
        pieces = tuple(_piece(low, high, position, position) for position in _envelope(low, high))
    else:
        pieces = (_piece(low, high, low.peak, high.peak),)
        deviation = max(deviation, UNALIGNED_DEVIATION)
    for check in between:
        expected = max(piece.total_bytes(check.traced.batch_size) for piece in pieces)
        deviation = max(deviation, abs(expected / float(check.totals.max()) - 1))
    return PeakFit(pieces=pieces, batch_sizes=tuple(p.batch_size for p in passes), deviation=deviation)


def fit_end(passes: Sequence[Pass]) -> Piece:
    """What is held when a pass has ended, and no module holds activations any more. Passes as in `fit_peak`."""
    low, high = _Series(passes[0]), _Series(passes[-1])
    return replace(_piece(low, high, len(low.totals) - 1, len(high.totals) - 1), modules=())


def fit_volume(passes: Sequence[Pass]) -> tuple[tuple[float, float, int], ...]:
    """Storages that a pass allocates, as (constant, bytes per sample, how many of them). Passes as in `fit_peak`."""
    low, high = passes[0], passes[-1]
    large = [event.size_bytes for event in high.events if event.allocates]
    small = [event.size_bytes for event in low.events if event.allocates]
    if not are_aligned(low, high):  # what is there in the same size is taken to be constant
        same = Counter(small) & Counter(large)
        constant = [(float(size), 0.0, count) for size, count in same.items()]
        grown = [(0.0, size / high.batch_size, count) for size, count in (Counter(large) - same).items()]
        return (*constant, *grown)
    pairs = Counter(zip(small, large, strict=True))
    return tuple((*line(passes, a, b), count) for (a, b), count in pairs.items())


def fit_work(passes: Sequence[Pass]) -> WorkTrace | None:
    """The work of a pass; None where it was put together from others. Passes as in `fit_peak`."""
    low, high = passes[0].work, passes[-1].work
    if low is None or high is None:
        return None
    return WorkTrace(
        flops=tuple((*key, *line(passes, low.flops.get(key, 0.0), flops)) for key, flops in high.flops.items()),
        moved_bytes=line(passes, low.moved_bytes, high.moved_bytes),
        plain_bytes=line(passes, low.plain_bytes, high.plain_bytes),
        num_operators=high.num_operators,
    )


def excess_at_peak(update: Pass) -> tuple[float, ...]:
    """Bytes by purpose at the peak of a pass, beyond those held when it began."""
    series = _Series(update)
    return tuple((series.living[:, series.peak] - series.living[:, 0]).tolist())


def are_aligned(*passes: Pass) -> bool:
    """Whether passes do the same, in other sizes."""
    first, *others = ([(event.allocates, p.purposes[event.key]) for event in p.events] for p in passes)
    return all(other == first for other in others)


def line(passes: Sequence[Pass], low: F, high: F) -> tuple[F, F]:
    """Constant and slope in the batch size of figures at the first and the last of some passes."""
    low_size, high_size = passes[0].batch_size, passes[-1].batch_size
    slope = (high - low) / (high_size - low_size)
    return low - slope * low_size, slope


class _Series:
    """A pass as series over its events; position 0 is before the first one."""

    def __init__(self, traced: Pass) -> None:
        self.traced = traced
        changes = np.zeros((len(Purpose), len(traced.events) + 1))
        for key, size_bytes in traced.held.items():
            changes[traced.purposes[key], 0] += size_bytes
        for position, event in enumerate(traced.events, start=1):
            changes[traced.purposes[event.key], position] = event.change_bytes
        self.living = np.asarray(changes.cumsum(axis=1))  # bytes, purposes by positions
        self.totals = np.asarray(self.living.sum(axis=0))
        self.peak = int(self.totals.argmax())  # its position

    def modules(self, position: int) -> Counter[str]:
        """Bytes of the activations that live at a position, by module."""
        held: Counter[str] = Counter()
        for event in self.traced.events[:position]:
            if event.key in self.traced.modules:
                held[self.traced.modules[event.key]] += event.change_bytes
        return held


def _piece(low: _Series, high: _Series, at_low: int, at_high: int) -> Piece:
    """Through what lives at a position of one pass and at a position of the other."""
    passes = low.traced, high.traced
    constants, slopes = line(passes, low.living[:, at_low], high.living[:, at_high])
    of_low, of_high = low.modules(at_low), high.modules(at_high)
    largest = [name for name, _ in of_high.most_common(NUM_MODULES)]
    return Piece(
        constant=tuple(constants.tolist()),
        per_sample=tuple(slopes.tolist()),
        modules=tuple((name, *line(passes, of_low[name], of_high[name])) for name in largest),
    )


def _envelope(low: _Series, high: _Series) -> list[int]:
    """Positions whose sums are the largest of all at some batch size from 1 on."""
    constants, slopes = line((low.traced, high.traced), low.totals, high.totals)
    position = int(np.lexsort((slopes, constants + slopes))[-1])
    found = [position]
    while (steeper := np.flatnonzero(slopes > slopes[position])).size:
        crossings = (constants[position] - constants[steeper]) / (slopes[steeper] - slopes[position])
        next_ones = steeper[crossings <= crossings.min()]
        position = int(next_ones[slopes[next_ones].argmax()])
        found.append(position)
    return found
