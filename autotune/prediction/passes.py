"""What a trace has seen of a training step: every storage that is allocated and freed, in program order, and what for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from autotune.records.calibration import Work


class Event(NamedTuple):
    """One storage allocated or freed.

    Attributes:
        key: the same for the allocation and the freeing of one storage, and never used again.
        size_bytes: the storage's own size, before an allocator rounds it.
        allocates: True when it is allocated, False when it is freed.
    """

    key: int
    size_bytes: int
    allocates: bool

    @property
    def change_bytes(self) -> int:
        """By which the living storages grow."""
        return self.size_bytes if self.allocates else -self.size_bytes


class Purpose(IntEnum):
    """What a storage is for; `Breakdown` describes each."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    TEMPORARIES = 4


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
    """

    alone: tuple[Pass, ...]
    beside: tuple[Pass, ...]
    before: tuple[Event, ...]


class Updates(NamedTuple):
    """Updates of the parameters: the first one, in which the optimizer allocates its state, and the second."""

    first: Pass
    second: Pass
