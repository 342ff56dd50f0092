"""What fits into a memory, as `predict` answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.records.config import Choice
from autotune.records.device import NO_COMMUNICATORS, Communicators
from autotune.records.formats import Record

LARGEST_BATCH = 2**16  # no larger one is tried where neither a global batch nor a dataset bounds the batch


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """What the allocator holds at the moment of its peak, by purpose.

    Attributes:
        parameters_bytes: parameters and buffers of the model.
        gradients_bytes: gradients of the parameters.
        optimizer_bytes: the optimizer's state.
        activations_bytes: what the forward pass keeps for the backward pass.
        temporaries_bytes: everything else: inputs, results in flight, the optimizer's scratch space.
        modules: (name, bytes) of the modules whose forward passes hold most of the activations, largest first.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    temporaries_bytes: int
    modules: tuple[tuple[str, int], ...] = ()

    @property
    def total_bytes(self) -> int:
        """The sum over all purposes."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Bytes of each purpose by its name, without its unit."""
        kinds = ("parameters", "gradients", "optimizer", "activations", "temporaries")
        return {kind: getattr(self, f"{kind}_bytes") for kind in kinds}


@dataclass(frozen=True, kw_only=True)
class PredictedPeak(Breakdown):
    """The predicted peak of one config, and what it consists of: the breakdown and two more terms add up to it.

    Attributes:
        config: as a plain dict.
        peak_bytes: comparable with the memory limit; `peak_low_bytes` and `peak_high_bytes` bound 95 %.
        chance_to_fit: the probability that the peak is within the limit less headroom.
        allocator_bytes: what the allocator holds beyond the tensors: rounding, fragments, libraries' workspaces.
        outside_bytes: what is held outside the allocator: the process and its libraries, or the CUDA context and what
            `num_communicators` of the library of collectives hold.
    """

    config: dict[str, Choice]
    peak_bytes: int
    peak_low_bytes: int
    peak_high_bytes: int
    chance_to_fit: float
    allocator_bytes: int
    outside_bytes: int
    num_communicators: int = 0


@dataclass(frozen=True, kw_only=True)
class GroupPrediction:
    """One combination of the techniques that shape memory.

    Attributes:
        switched_on: choices that are not off.
        same_memory: choices of further combinations that need the same memory.
        peak: the peak at the largest batch size that fits, or, where none fits, at the smallest there is.
        fits: whether `peak` is within the limit less headroom, and its upper bound within the limit.
        bounded: whether all batch sizes fit that the global batch or the dataset allows, so that no larger one was tried.
    """

    switched_on: dict[str, Choice]
    same_memory: tuple[dict[str, Choice], ...]
    peak: PredictedPeak
    fits: bool
    bounded: bool


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction(Record):
    """What `predict` answers.

    Attributes:
        task: its name.
        device: the device predicted for, in words; `on_gpu` tells whether it is a GPU.
        memory_limit_bytes: the device's memory, or the user's limit.
        headroom: share of the limit that is to stay free.
        global_batch: samples per optimizer step, or None.
        communicators: what is known of those that are part of what is outside the allocator.
        fits: whether the config asked for, or else any config, fits: its peak is within the limit less headroom, and the
            peak's upper bound within the limit.
        config: the peak of the config that was asked for; None where none was.
        groups: one for each combination of techniques; empty where one config was asked for.
        untraced: combination of techniques -> why nothing could be predicted for it.
        left_out: technique that shapes memory -> why it, or some of its choices, does not apply or cannot be traced.
        warnings: what a reader has to know.
        trace_s: seconds that tracing took; `wall_s`: seconds that everything took.
    """

    task: str
    device: str
    on_gpu: bool
    memory_limit_bytes: int
    headroom: float
    global_batch: int | None
    fits: bool
    config: PredictedPeak | None
    groups: tuple[GroupPrediction, ...]
    untraced: dict[str, str]
    left_out: dict[str, str]
    warnings: tuple[str, ...]
    trace_s: float
    wall_s: float
    communicators: Communicators = NO_COMMUNICATORS

    @property
    def usable_bytes(self) -> int:
        """The limit less headroom."""
        return int(self.memory_limit_bytes * (1 - self.headroom))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON-ready data, marked as a prediction."""
        return {"predicted": True, **super().to_dict(), "usable_bytes": self.usable_bytes}
