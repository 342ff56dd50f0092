"""Detects memory that grows with the training: a leak in the user's code, or what libraries cache for each new batch shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import median

from autotune.devices import Device
from autotune.probe.observers.base import Observer, Taken
from autotune.records.outcome import Measurement
from autotune.units import MIB

MIN_INCREMENTS = 5  # that are needed after the first ones
MANY_INCREMENTS = 10
STEADY, STEADY_IN_FEW = 0.7, 0.85  # share of the increments, of many and of few, that have to be positive
LEAK_BYTES = 2 * MIB  # smaller growth over the timed blocks may be the allocator's own fluctuation
FEWEST_INCREMENTS = 4  # for a trend: five points that only rise are one sequence in 120
SURE_Z = 2.2  # of the trend: these five exceed it
PAGES_BYTES = MIB // 4  # smaller steps of a heap are no new kernels
STEPWISE = 0.3  # share of the increments that have to be positive for a trend: one wide batch alone makes none
GIVEN_BACK = 0.25  # of what was taken: an allocator gives back nearly all, a cache nothing
MOST_POINTS = 100  # all pairs of them are looked at
FEWEST_SHAPES = 2


@dataclass(frozen=True)
class Held:
    """What the process holds after a step of the warm-up, or after a block.

    Attributes:
        num_steps, num_shapes: as `Taken` has them.
    """

    num_steps: float
    num_shapes: int
    num_bytes: int


class MemoryGrowth(Observer):
    """Reads what the process holds after each step of the warm-up and after each block."""

    name = "memory growth"

    def __init__(self) -> None:
        self._held: list[Held] = []

    def sample_warmup(self, device: Device, taken: Taken) -> None:
        """Note how much memory is held now: a short probe warms up for longer than it is timed."""
        self.sample(device, taken)

    def sample(self, device: Device, taken: Taken) -> None:
        """Note how much memory is held now."""
        self._held.append(Held(taken.num_steps, taken.num_shapes, device.current_bytes()))

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """Fill in `growth_bytes_per_step`, and where batches differ in shape `growth_bytes_per_shape`.

        On a device with memory of its own an allocator holds more than is in use, so what is in use says nothing of its peak.
        """
        may_grow = measured.num_shapes >= FEWEST_SHAPES and not device.capabilities.own_memory
        return replace(
            measured,
            growth_bytes_per_step=growth_per_step(self._held),
            growth_bytes_per_shape=growth_per_shape(self._held) if may_grow else 0.0,
        )


def growth_per_step(held: Sequence[Held]) -> float:
    """Bytes by which memory grows per optimizer step; 0 unless it clearly grows.

    The first blocks, in which allocators settle, are left out. Growth counts if it is steady (in nearly every block where there are
    few, in most where there are many) and exceeds the fluctuation of allocators. It is the median over the blocks: one wide batch
    makes room that the process keeps, and says nothing of the next steps.
    """
    settled = _settled(held)
    steps = [
        (after.num_steps - before.num_steps, after.num_bytes - before.num_bytes) for before, after in pairwise(settled)
    ]
    if len(steps) < MIN_INCREMENTS:
        return 0.0
    growing = sum(grown > 0 for _, grown in steps) / len(steps)
    growth = median(grown / num_steps for num_steps, grown in steps)
    is_steady = growing >= (STEADY if len(steps) >= MANY_INCREMENTS else STEADY_IN_FEW)
    return growth if is_steady and growth * (settled[-1].num_steps - settled[0].num_steps) >= LEAK_BYTES else 0.0


def growth_per_shape(held: Sequence[Held]) -> float | None:
    """Bytes by which memory grows with each new shape of a batch; 0 unless it clearly grows to the end, None where that cannot be told.

    Libraries cache something for each shape. (oneDNN's kernels took 18 to 26 MiB for each length of a batch in a tagger in bf16, and
    11 MiB in a recognizer of speech in fp32; the tagger in fp32 kept nothing.)

    Source: the trend's test is Mann's (Nonparametric tests against trend, Econometrica 13, 1945), its slope Sen's (Estimates of the
    regression coefficient based on Kendall's tau, JASA 63, 1968).
    """
    settled = _settled(held)
    settled = settled[:: -math.ceil(len(settled) / MOST_POINTS) or -1][::-1]  # the last one is among them
    count, increments = len(settled), [after.num_bytes - before.num_bytes for before, after in pairwise(settled)]
    growing = sum(grown > PAGES_BYTES for grown in increments)
    taken, given_back = sum(max(0, grown) for grown in increments), sum(max(0, -grown) for grown in increments)
    if len(increments) < FEWEST_INCREMENTS:
        return None
    if growing < STEPWISE * len(increments) or given_back > GIVEN_BACK * taken:
        return 0.0
    pairs = [(before.num_bytes, after.num_bytes) for before, after in combinations(settled, 2)]
    signs = sum((after > before) - (after < before) for before, after in pairs)
    if signs - 1 < SURE_Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18):
        return 0.0
    slopes = [slope for part in (settled, settled[count // 2 :]) if (slope := _slope(part)) is not None]
    return max(0.0, min(slopes, default=0.0))


def _slope(held: Sequence[Held]) -> float | None:
    """Bytes for each new shape; None where there was no new one."""
    later = [(before, after) for before, after in combinations(held, 2) if after.num_shapes > before.num_shapes]
    slopes = [(after.num_bytes - before.num_bytes) / (after.num_shapes - before.num_shapes) for before, after in later]
    return median(slopes) if slopes else None


def _settled(held: Sequence[Held]) -> Sequence[Held]:
    """Without the first ones, in which allocators settle."""
    return held[max(1, len(held) // 3) :]
