"""What the allocator holds at the peak of a training step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


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
        """Of all purposes."""
        held_bytes = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return held_bytes + self.activations_bytes + self.temporaries_bytes


@dataclass(frozen=True, kw_only=True)
class TracedPeak:
    """The allocator's peak over whole training steps of one config, found by tracing it without running it.

    Attributes:
        peak_bytes: on a CPU the largest sum of living tensors; on CUDA what the caching allocator has reserved for them.
        uncertainty: relative standard deviation of `peak_bytes` as far as the fit in the batch size goes: near 0 at a
            batch size that was traced, larger between and beyond where storages were seen not to be affine.
        breakdown: of the living tensors at the peak.
        volume_bytes: all that one micro batch allocates from the heap, also what is freed before the peak: a heap that is
            not made for tensors keeps a part of it. 0 where the allocator itself was simulated.
    """

    peak_bytes: int
    uncertainty: float
    breakdown: Breakdown
    volume_bytes: int
