"""Detects memory that grows with each step: a leak in the user's code, or what libraries cache for each new batch shape."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

from autotune.devices import Device
from autotune.probe.observers.base import Observer
from autotune.records.outcome import Measurement
from autotune.units import MIB

MIN_INCREMENTS = 5  # that are needed after the first ones
MANY_INCREMENTS = 10
STEADY, STEADY_IN_FEW = 0.7, 0.85  # share of the increments, of many and of few, that have to be positive
LEAK_BYTES = 2 * MIB  # smaller growth over the timed blocks may be the allocator's own fluctuation


class MemoryGrowth(Observer):
    """Reads what the process keeps after each step of the warm-up and after each block."""

    name = "memory growth"

    def __init__(self) -> None:
        self._held: list[tuple[float, int]] = []

    def sample_warmup(self, device: Device, num_steps: float) -> None:
        """Note how much memory is kept now: a short probe warms up for longer than it is timed."""
        self.sample(device, num_steps)

    def sample(self, device: Device, num_steps: float) -> None:
        """Note how much memory is kept now."""
        self._held.append((num_steps, device.kept_bytes()))

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """Fill in `growth_bytes_per_step`."""
        return replace(measured, growth_bytes_per_step=growth_per_step(self._held))


def growth_per_step(held: list[tuple[float, int]]) -> float:
    """Bytes by which memory grows per optimizer step, from (step, bytes) after each block; 0 unless it clearly grows.

    The first blocks, in which allocators settle, are left out. Growth counts if it is steady (in nearly every block where there are
    few, in most where there are many) and exceeds the fluctuation of allocators. It is the median over the blocks: what one batch
    alone leaves says nothing of the next steps.
    """
    # of few only as many as leave enough: after the first step comes the one with the largest batches, which widens the heap
    settled = held[max(1, min(len(held) // 3, len(held) - MIN_INCREMENTS - 1)) :]
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(settled)]
    if len(steps) < MIN_INCREMENTS:
        return 0.0
    growing = sum(grown > 0 for _, grown in steps) / len(steps)
    growth = median(grown / num_steps for num_steps, grown in steps)
    is_steady = growing >= (STEADY if len(steps) >= MANY_INCREMENTS else STEADY_IN_FEW)
    return growth if is_steady and growth * (settled[-1][0] - settled[0][0]) >= LEAK_BYTES else 0.0
