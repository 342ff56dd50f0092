"""What a trace has seen of a training step: every storage that is allocated and freed, in program order, and what for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from autotune.predict.events import Event


class Purpose(IntEnum):
    """What a storage is for; `autotune.predict.footprint.Breakdown` describes each."""

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
        held: key -> bytes of the storages that are there when it begins, in the order of their allocation.
        events: what it allocates and frees.
        purposes: key -> purpose of all storages that occur.
        modules: key of an activation -> the module in whose forward pass it was allocated.
    """

    batch_size: int
    held: Mapping[int, int]
    events: tuple[Event, ...]
    purposes: Mapping[int, Purpose]
    modules: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class MicroSteps:
    """Micro batches, forward and backward, at several batch sizes. The optimizer has no state yet.

    Attributes:
        alone: with no gradients before it, in increasing order of the batch sizes.
        beside: of the smallest and the largest batch size a second one, beside the gradients of the first.
        input_bytes: of the input batch, as far as it counts, at each batch size.
    """

    alone: tuple[Pass, ...]
    beside: tuple[Pass, ...]
    input_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Updates of the parameters: the first one, in which the optimizer allocates its state, and the second."""

    first: Pass
    second: Pass
