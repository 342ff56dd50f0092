"""What a training on a CPU keeps for the shapes of its micro batches (kernels), of any config, by the probes of others."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from autotune.prediction.cost import Probes
from autotune.records.config import Choice, Config, ShapeGrowth
from autotune.records.device import FP32
from autotune.records.outcome import Measurement
from autotune.techniques import Techniques

Group = tuple[tuple[str, Choice], ...]
Growths = dict[Group, dict[int, list[ShapeGrowth]]]  # by micro batch

# Exponent of the ratio of two micro batches: one is as wide as its longest sample, and the widest of many samples varies less. With clips
# of sound 12, 20 to 31, 50 to 71, 101, 117 and 121 shapes were expected of micro batches of 64, 32, 8, 4, 2 and 1. Less may be kept for
# each of a small one, though: for a single clip it was less than half. A micro batch smaller than all that were probed is expected to
# keep as much as the smallest of these.
FEWER_SHAPES = 0.6
UNSURE = 0.4  # share of what is kept, where no such config was probed


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that a config keeps, with their standard deviation."""

    num_bytes: float
    std_bytes: float


@dataclass(frozen=True)
class _Found:
    growth: ShapeGrowth
    kept: Kept


class KeptForShapes:
    """Probes tell how much is kept for a shape, and how many shapes a training meets; the product is at most what a full cache takes.

    oneDNN kept as much for a shape with micro batches of 4 to 64 samples, and in models of two, three and four equal layers. Where no
    probe had the same techniques, those that compute in the same types tell it.
    """

    def __init__(self, techniques: Techniques, probes: Probes) -> None:
        self._techniques = techniques
        self._own: Growths = {}
        self._by_types: Growths = {}
        self._num_shapes: dict[Group, dict[int, float]] = {}
        self._found: dict[tuple[Group, int], _Found | None] = {}
        for config, outcome in probes:
            found, size = outcome.measurement, config.batch_size
            if found is None or (growth := found.shape_growth) is None:
                continue
            self._own.setdefault(techniques.shapes_group(config), {}).setdefault(size, []).append(growth)
            self._by_types.setdefault(self._types_of(config), {}).setdefault(size, []).append(growth)
            if growth.bytes_per_shape:  # else it has looked at few batches
                numbers = self._num_shapes.setdefault(techniques.drawing_group(config), {})
                numbers[size] = max(found.num_shapes_expected, numbers.get(size, 1.0))

    def of(self, config: Config) -> Kept | None:
        """What a config keeps; None where no probe with such kernels has seen memory grow."""
        found = self._look_up(config)
        return None if found is None else found.kept

    def missing_bytes(self, config: Config, measured: Measurement) -> float:
        """By how much more a config is expected to keep than its measured peak contains.

        A probe that was cut short has looked at few batches, and another one may have told a growth that is far off.
        """
        if (found := self._look_up(config)) is None:
            return 0.0
        if measured.shape_growth is not None:
            return found.kept.num_bytes - _bytes_of(measured.shape_growth, measured.num_shapes_expected)
        contained = found.growth.bytes_per_shape * measured.num_shapes + measured.long_run_growth_bytes
        return max(0.0, found.kept.num_bytes - contained)

    def _look_up(self, config: Config) -> _Found | None:
        if not self._num_shapes:
            return None
        key = self._techniques.shapes_group(config), config.batch_size
        if key not in self._found:
            self._found[key] = self._find(config)
        return self._found[key]

    def _find(self, config: Config) -> _Found | None:
        own, size = self._own.get(self._techniques.shapes_group(config), {}), config.batch_size
        told = own or self._by_types.get(self._types_of(config))
        numbers = self._num_shapes.get(self._techniques.drawing_group(config))
        if not told or not numbers:
            return None
        nearest = min(told, key=lambda other: abs(math.log(other / size)))
        growth = ShapeGrowth.typical(told[nearest])
        if growth is None or not growth.bytes_per_shape:
            return None
        if growth.most_bytes is None:
            alike = told[nearest] if size in own else [one for found in told.values() for one in found]
            growth = replace(growth, most_bytes=max((one.most_bytes for one in alike if one.most_bytes), default=None))
        num_bytes = _bytes_of(growth, _number(numbers, size))
        return _Found(growth, Kept(num_bytes=num_bytes, std_bytes=0.0 if size in own else UNSURE * num_bytes))

    def _types_of(self, config: Config) -> Group:
        """Those choices of the shapes' group that decide in which types a config computes, or which samples are drawn."""
        techniques = self._techniques
        return tuple(
            (name, choice)
            for name, choice in techniques.shapes_group(config)
            if techniques[name].changes_learning or techniques[name].arithmetic(choice) != FP32
        )


def _bytes_of(growth: ShapeGrowth, num_shapes: float) -> float:
    return min(growth.bytes_per_shape * num_shapes, math.inf if growth.most_bytes is None else growth.most_bytes)


def _number(known: dict[int, float], size: int) -> float:
    """Shapes of micro batches of a size, by those of other sizes."""
    if size in known:
        return known[size]
    sizes = sorted(known)
    for small, large in pairwise(sizes):
        if small < size < large:
            share = math.log(size / small) / math.log(large / small)
            return math.exp((1 - share) * math.log(known[small]) + share * math.log(known[large]))
    return (
        known[sizes[0]] if size < sizes[0] else max(1.0, known[sizes[-1]] * float((sizes[-1] / size) ** FEWER_SHAPES))
    )
