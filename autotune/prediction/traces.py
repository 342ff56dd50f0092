"""Which configs to trace so that every config of a space is known, and what their traces say about all of them.

Each group of techniques is traced once, at a few batch sizes. Plain data, without torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from autotune.records.capacity import Breakdown
from autotune.records.config import ALONE, Choice, Config, World
from autotune.records.formats import Record, decode
from autotune.task.unequal_samples import LengthDistribution
from autotune.techniques import Phase, Techniques

Group = tuple[tuple[str, Choice], ...]  # (technique, choice) of what is not off

# Samples: of a dataset, which are read one by one, and of what `make_batch` makes at once. The fit is exact beyond them, too, unless
# the check shows otherwise, or an operator takes another kernel for many rows.
LARGEST_READ, LARGEST_MADE = 32, 4096
MAX_BATCH_BYTES = 64 * 2**20  # of an input batch, which is really made
MAX_ALLOCATOR_SIZES = 8  # batch sizes at which the caching allocator is simulated
LARGEST_ON_HEAP_BYTES = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX, see mallopt(3)

FORMAT = 7  # of the JSON; counts up when its meaning changes


class Purpose(IntEnum):
    """What a storage is for; `Breakdown` describes each."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    TEMPORARIES = 4


def model_label(group: Group) -> str:
    """A group of techniques that act on the model, in words."""
    return f"model: {_in_words(group)}"


def update_label(group: Group) -> str:
    """A group of techniques that act on the optimizer, in words."""
    return f"optimizer: {_in_words(group)}"


def _in_words(group: Group) -> str:
    return ", ".join(f"{name}={choice}" for name, choice in group) or "nothing switched on"


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
        fixed_volume_bytes: the part of it that is the same for any number of samples: gradients, casts, gathered parameters.
    """

    peak_bytes: int
    uncertainty: float
    breakdown: Breakdown
    volume_bytes: int
    fixed_volume_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Living storages at one moment of a training step, in bytes, as a line in the batch size.

    Attributes:
        constant: bytes by purpose, in the order of `Purpose`, that are there at any batch size.
        per_sample: bytes by purpose that each sample of the micro batch adds.
        modules: (name, constant, per sample) of the modules that hold most of the activations.
    """

    constant: tuple[float, ...]
    per_sample: tuple[float, ...]
    modules: tuple[tuple[str, float, float], ...] = ()

    def total_bytes(self, batch_size: int) -> float:
        """Bytes of all purposes."""
        return sum(self.constant) + sum(self.per_sample) * batch_size

    def by_purpose(self, batch_size: int) -> list[float]:
        """Bytes by purpose."""
        return [c + s * batch_size for c, s in zip(self.constant, self.per_sample, strict=True)]


@dataclass(frozen=True, kw_only=True)
class PeakFit:
    """The peak of a pass at any batch size: the largest of some lines.

    Attributes:
        pieces: these lines, at least one.
        batch_sizes: that were traced, in increasing order.
        deviation: relative error of the fit at batch sizes that were traced to check it; plain training's where none was.
    """

    pieces: tuple[Piece, ...]
    batch_sizes: tuple[int, ...]
    deviation: float

    def at(self, batch_size: int) -> Piece:
        """The line that is the peak."""
        return max(self.pieces, key=lambda piece: piece.total_bytes(batch_size))

    def uncertainty(self, batch_size: int) -> float:
        """Relative standard deviation: 0 at the smallest and the largest size that were traced, `deviation` between them, and one
        `deviation` more for each doubling or halving beyond.
        """
        low, high = self.batch_sizes[0], self.batch_sizes[-1]
        if batch_size in (low, high):
            return 0.0
        octaves = max(0.0, math.log2(batch_size / high), math.log2(low / batch_size))
        return self.deviation * (1 + octaves)


@dataclass(frozen=True, kw_only=True)
class WorkTrace:
    """The work of a micro batch, forward and backward, as lines in the batch size: (constant, per sample).

    Attributes:
        flops: (kind of work, type, constant, per sample) of matrix products and convolutions.
        moved_bytes, plain_bytes, num_operators: as in `Work`.
    """

    flops: tuple[tuple[str, str, float, float], ...]
    moved_bytes: tuple[float, float]
    plain_bytes: tuple[float, float]
    num_operators: int


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """The ratio of what CUDA's caching allocator reserves to the largest sum of bytes that live at once.

    Attributes:
        added: what the techniques of a config add to the allocator's settings.
        factors: (batch size, with one micro batch a step, with more) in increasing order.
        update: the techniques that act on the optimizer; blocks that an update frees are used again.
    """

    added: str
    factors: tuple[tuple[int, float, float], ...]
    update: Group = ()

    def factor(self, batch_size: int, *, accumulates: bool) -> tuple[float, float]:
        """Factor from living storages to reserved memory, and its relative standard deviation."""
        sizes, alone, beside = zip(*self.factors, strict=True)
        factors = beside if accumulates else alone
        if batch_size in sizes:
            return factors[sizes.index(batch_size)], 0.0
        place = bisect_left(sizes, batch_size)
        spread, nearby_spread = np.ptp(factors), np.ptp(factors[max(0, place - 1) : place + 1])
        factor = np.interp(math.log(batch_size), np.log(sizes), factors)
        return float(factor), max(float(spread) / 4, float(nearby_spread) / 2)


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """Micro batches of one group of techniques that act on the model. No optimizer state is counted in.

    Attributes:
        alone: the first micro batch of a step.
        beside: a further one, beside the gradients of those before it.
        before_update: what is held when the optimizer begins.
        input_bytes: (constant, per sample) of an input batch.
        volume: (constant, bytes per sample, how many) of the storages that the first micro batch allocates.
        reserved: on CUDA, by what techniques add to the allocator's settings and by the update; with the plain ones first.
        work: where it is known.
    """

    alone: PeakFit
    beside: PeakFit
    before_update: Piece
    input_bytes: tuple[float, float]
    volume: tuple[tuple[float, float, int], ...]
    reserved: tuple[Reserved, ...] = ()
    work: WorkTrace | None = None

    def volume_bytes(self, batch_size: int) -> tuple[int, int]:
        """All that the first micro batch allocates from a heap, and the part of it that is the same for any number of samples.

        What is larger is mapped, and leaves none of it behind.
        """
        sizes = [(constant + slope * batch_size, slope, count) for constant, slope, count in self.volume]
        on_heap = [(size * count, slope) for size, slope, count in sizes if size < LARGEST_ON_HEAP_BYTES]
        return round(sum(size for size, _ in on_heap)), round(sum(size for size, slope in on_heap if not slope))

    def reserved_factor(self, batch_size: int, update: Group, *, accumulates: bool, added: str) -> tuple[float, float]:
        """Factor from living storages to reserved memory, and its relative standard deviation.

        An update with which the allocator was not simulated counts as the plain one.
        """
        if not self.reserved:
            return 1.0, 0.0
        known = {(each.update, each.added): each for each in self.reserved}
        alike = (each for each in self.reserved if each.added == added)
        return (known.get((update, added)) or next(alike, self.reserved[0])).factor(batch_size, accumulates=accumulates)

    def joined(self, other: ModelTrace) -> ModelTrace:
        """`other`, a trace of the same group, with those entries of `reserved` that only this one has."""
        known = {(each.update, each.added): each for each in (*self.reserved, *other.reserved)}
        return replace(other, reserved=tuple(known.values()))

    def holds(self, other: ModelTrace) -> bool:
        """Whether all of another trace is known here, too."""
        return replace(self, reserved=other.reserved) == other and set(other.reserved) <= set(self.reserved)


@dataclass(frozen=True, kw_only=True)
class UpdateTrace:
    """Updates with one group of techniques that act on the optimizer.

    Attributes:
        state_bytes: of the optimizer.
        first: bytes by purpose at the peak of the first update, which allocates the state, beyond those before it.
        later: the same for every other update, in which the state is there.
        moved_bytes, num_operators: of such an update, as in `Work`.
    """

    state_bytes: float
    first: tuple[float, ...]
    later: tuple[float, ...]
    moved_bytes: float = 0.0
    num_operators: int = 0


def largest(
    model: ModelTrace, update: UpdateTrace, batch_size: int, *, accumulates: bool
) -> tuple[PeakFit, Piece, list[float], bool]:
    """The peak of a training step.

    Returns:
        The fit of the micro batch that needs most, its line at this batch size, the bytes by purpose at the step's peak, and
        whether that is in a micro batch (False: in an update).
    """
    fits = (model.beside, model.alone) if accumulates else (model.alone,)
    fit = max(fits, key=lambda fit: fit.at(batch_size).total_bytes(batch_size))
    piece = fit.at(batch_size)
    during = piece.by_purpose(batch_size)
    during[Purpose.OPTIMIZER] += update.state_bytes
    before = model.before_update.by_purpose(batch_size)
    first, later = ([a + b for a, b in zip(before, more, strict=True)] for more in (update.first, update.later))
    later[Purpose.OPTIMIZER] += update.state_bytes
    parts = max((during, first, later), key=sum)
    return fit, piece, parts, parts is during


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What is known of a task's memory without running it.

    The peak of a training step is the largest of three: forward and backward pass of its first micro batch, of a further
    one beside the gradients, and the update. The first two depend on the techniques that act on the model and on the
    batch size, the last on those that act on the optimizer, and on what the others leave there.

    Attributes:
        target: the kind of device they predict (`autotune.devices.targets`).
        models: per group of techniques that act on the model.
        updates: per group of techniques that act on the optimizer.
        failures: label of a group (`model_label`, `update_label`) that could not be traced -> why, in one line.
        lengths: of the training set's samples, where they are known.
    """

    target: str
    models: Mapping[Group, ModelTrace] = field(default_factory=dict)
    updates: Mapping[Group, UpdateTrace] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    lengths: LengthDistribution | None = None

    def peak(self, config: Config, techniques: Techniques) -> TracedPeak | None:
        """The allocator's peak over whole steps of `config`; None when its techniques were not traced.

        On a CPU all micro batches of a step are there while it runs, as the session's loader gives them.
        """
        if config not in self._peaks:
            self._peaks[config] = self._peak(config, techniques)
        return self._peaks[config]

    @cached_property
    def _peaks(self) -> dict[Config, TracedPeak | None]:  # a search asks for all of a space's after each probe
        return {}

    def _peak(self, config: Config, techniques: Techniques) -> TracedPeak | None:
        model = self.models.get(techniques.micro_batch_group(config))
        update_group = techniques.update_group(config)
        update = self.updates.get(update_group)
        if model is None or update is None:
            return None
        size, accumulates = config.batch_size, config.accumulation_steps > 1
        fit, piece, parts, in_micro_batch = largest(model, update, size, accumulates=accumulates)
        parts[Purpose.TEMPORARIES] += (config.accumulation_steps - 1) * (
            model.input_bytes[0] + model.input_bytes[1] * size
        )
        added = techniques.allocator_settings(config)
        factor, factor_deviation = model.reserved_factor(size, update_group, accumulates=accumulates, added=added)
        modules = piece.modules if in_micro_batch else ()
        held_by = [(name, round(constant + slope * size)) for name, constant, slope in modules]
        breakdown = Breakdown(
            **{f"{purpose.name.lower()}_bytes": round(parts[purpose]) for purpose in Purpose},
            modules=tuple(sorted(held_by, key=lambda pair: -pair[1])),
        )
        volume_bytes, fixed_volume_bytes = (0, 0) if model.reserved else model.volume_bytes(size)
        return TracedPeak(
            peak_bytes=round(sum(parts) * factor),
            uncertainty=math.hypot(fit.uncertainty(size) if in_micro_batch else 0.0, factor_deviation),
            breakdown=breakdown,
            volume_bytes=volume_bytes,
            fixed_volume_bytes=fixed_volume_bytes,
        )

    @property
    def knows_plain(self) -> bool:
        """Whether training with nothing switched on was traced."""
        return () in self.models and () in self.updates

    def merged(self, other: Traces) -> Traces:
        """What either knows; where both know a group, `other`'s. A group that was traced is no failure."""
        both = {
            group: self.models[group].joined(other.models[group]) for group in self.models.keys() & other.models.keys()
        }
        models, updates = {**self.models, **other.models, **both}, {**self.updates, **other.updates}
        known = {*map(model_label, models), *map(update_label, updates)}
        failures = {label: why for label, why in {**self.failures, **other.failures}.items() if label not in known}
        lengths = other.lengths or self.lengths
        return Traces(target=self.target, models=models, updates=updates, failures=failures, lengths=lengths)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON-ready data."""
        data = asdict(self)
        pairs = {name: list(data[name].items()) for name in ("models", "updates")}
        return {"format": FORMAT, **data, **pairs, "lengths": self.lengths and self.lengths.quantiles}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Traces:
        """What `to_dict` gave, after JSON. Raises ValueError when the data has another form."""
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r} is not {FORMAT}")
            return Traces(
                target=data["target"],
                models={decode(Group, group): decode(ModelTrace, trace) for group, trace in data["models"]},
                updates={decode(Group, group): decode(UpdateTrace, trace) for group, trace in data["updates"]},
                failures=dict(data["failures"]),
                lengths=LengthDistribution(tuple(data["lengths"])) if data["lengths"] else None,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these are no traces: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """What to trace.

    Attributes:
        models: groups of techniques that act on the model, nothing switched on first.
        updates: groups of techniques that act on the optimizer, likewise.
        simulated: the same with those that are known: the caching allocator is simulated with each that goes with a model's.
        batch_sizes: of the space, in increasing order.
        lengths: whether to look at the lengths of samples, too.
        trained: what is trained, where it is not the task as it stands: the same for all groups.
        world: the processes that train together; rank 0 is traced.
        deviation: of `PeakFit`, of plain training, where that was traced before: the other groups take it over.
    """

    models: tuple[Group, ...]
    updates: tuple[Group, ...]
    batch_sizes: tuple[int, ...]
    lengths: bool = True
    trained: Group = ()
    simulated: tuple[Group, ...] = ()
    world: World = ALONE
    deviation: float | None = None

    def without(self, traces: Traces) -> Plan:
        """What `traces` does not know, be it that it failed: nothing where plain training failed, which all others need."""
        failed, plain = traces.failures, traces.models.get(())
        left = replace(
            self,
            lengths=self.lengths and traces.lengths is None,
            deviation=plain.alone.deviation if plain else self.deviation,
        )
        if model_label(()) in failed:
            return replace(left, models=(), updates=())
        return replace(
            left,
            models=tuple(g for g in self.models if g not in traces.models and model_label(g) not in failed),
            updates=tuple(g for g in self.updates if g not in traces.updates and update_label(g) not in failed),
        )

    def needed_by(self, configs: Iterable[Config], techniques: Techniques) -> Plan:
        """What some configs need, and plain training, with which their traces are compared."""
        needed = plan_traces(configs, techniques)
        return replace(
            self,
            models=tuple(group for group in self.models if group in needed.models),
            updates=tuple(group for group in self.updates if group in needed.updates),
        )

    def labels(self) -> list[str]:
        """Of all groups."""
        return [*map(model_label, self.models), *map(update_label, self.updates)]


def plan_traces(configs: Iterable[Config], techniques: Techniques, world: World = ALONE) -> Plan:
    """What to trace for `configs`, which all train the same: with nothing switched on first, since all others are compared
    with it, then what switches on the least.
    """
    configs = list(configs)

    def groups(of_config: Callable[[Config], Group]) -> tuple[Group, ...]:
        return tuple(sorted(dict.fromkeys([(), *map(of_config, configs)]), key=len))

    updates = groups(techniques.update_group)
    return Plan(
        models=groups(techniques.micro_batch_group),
        updates=updates,
        batch_sizes=tuple(sorted({config.batch_size for config in configs})),
        trained=techniques.switched_on(configs[0], Phase.TASK) if configs else (),
        simulated=updates,
        world=world,
    )


def traced_sizes(largest: int, *, sample_bytes: float, most: int | None) -> tuple[int, int]:
    """The smallest and the largest batch size to trace.

    Args:
        largest: batch size of the space.
        sample_bytes: of the input batch, per sample.
        most: samples that there are; None without end.
    """
    low = 2 if most is None or most > 2 else 1
    largest_traced = LARGEST_MADE if most is None else LARGEST_READ
    high = max(low + 1, min(largest, largest_traced, int(MAX_BATCH_BYTES / max(sample_bytes, 1.0))))
    return low, high if most is None else min(high, most)


def allocator_sizes(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Of many batch sizes the smallest, the largest and some between them, in equal ratios."""
    if len(batch_sizes) <= MAX_ALLOCATOR_SIZES:
        return tuple(batch_sizes)
    wanted = np.geomspace(batch_sizes[0], batch_sizes[-1], MAX_ALLOCATOR_SIZES)
    return tuple(sorted({min(batch_sizes, key=lambda size: abs(math.log(size / at))) for at in wanted}))
