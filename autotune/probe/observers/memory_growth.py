"""Detects a memory leak in the user's code: memory that grows with every training step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from autotune.devices import Device
from autotune.probe.observers.base import Observer
from autotune.records.outcome import Measurement

MIN_GROWTH_POINTS = 5  # blocks that are needed after the first ones
LEAK_BYTES = 2 * 2**20  # smaller growth over the timed blocks may be the allocator's own fluctuation


class MemoryGrowth(Observer):
    """Reads what the process holds after each block."""

    name = "memory growth"

    def __init__(self) -> None:
        self._held: list[tuple[int, int]] = []

    def sample(self, device: Device, num_steps: int) -> None:
        """Note how much memory is held now."""
        self._held.append((num_steps, device.current_bytes()))

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """Fill in `growth_bytes_per_step`."""
        return replace(measured, growth_bytes_per_step=growth_per_step(self._held))


def growth_per_step(held: list[tuple[int, int]]) -> float:
    """Bytes by which memory grows per optimizer step, from (step, bytes) after each block; 0 unless it clearly grows.

    The first blocks, in which allocators settle, are left out. Growth counts if it is steady (in every block where there are few,
    in most where there are many) and exceeds the fluctuation of allocators.
    """
    settled = held[max(1, len(held) // 3) :]
    if len(settled) < MIN_GROWTH_POINTS:
        return 0.0
    increments = [after - before for (_, before), (_, after) in pairwise(settled)]
    total = settled[-1][1] - settled[0][1]
    growing = sum(increment > 0 for increment in increments)
    steady = growing == len(increments) if len(increments) < 2 * MIN_GROWTH_POINTS else growing >= 0.7 * len(increments)
    if not steady or total < LEAK_BYTES:
        return 0.0
    return total / (settled[-1][0] - settled[0][0])
