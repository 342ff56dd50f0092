"""Configs with what fresh processes measured, in training and in evaluation; the best of them, and how rounds differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol, TypeVar

from autotune.records.config import Choice
from autotune.records.formats import Record

# every room takes its intervals of 95 % from here
NORMAL_95 = 1.96  # 95 % of a normal distribution lie within this many standard deviations of its mean
MOST_POLISHES = 50
SETTLED = 1e-5  # polishing settles at once if each config is in each round; if many are missing, a pass halves changes

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A config and what fresh processes measured of it. `samples_per_s_ci` is a 95 % interval (low, high).

    Attributes:
        joules_per_sample: energy of all devices that train together, with its 95 % interval; None where it is not known.
        by_probe: whether it played, and its speed is that of its probe in the search all the same: other work disturbed each of its
            processes in the play-off.
    """

    config: dict[str, Choice]
    samples_per_s: float
    samples_per_s_ci: tuple[float, float]
    peak_bytes: int
    step_s: float
    num_processes: int  # fresh processes behind the figures
    joules_per_sample: float | None = None
    joules_per_sample_ci: tuple[float, float] | None = None
    by_probe: bool = False


@dataclass(frozen=True, kw_only=True)
class Dropped(Measured):
    """A config that failed in the play-off, with figures from those of its processes that ran to the end; zeros where none did."""

    dropped: str  # why


@dataclass(frozen=True, kw_only=True)
class Rival(Measured):
    """Where the answer is the baseline: the best of the other configs in the play-off, with its throughput over the baseline's.

    Attributes:
        energy_ratio: the same for the energy of a sample; None where that is not known.
        training_speedup: the same for the throughput over the whole training, with its 95 % interval; None where its length is not
            known, or neither compiles.
    """

    speedup: float
    speedup_ci: tuple[float, float]
    energy_ratio: float | None = None
    energy_ratio_ci: tuple[float, float] | None = None
    training_speedup: tuple[float, float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class OneDevice(Measured):
    """Beside an answer for several devices: what the user would run on one of them, measured in rounds of their play-off. It was
    not searched. The figures are zeros where no process of it ran through.

    Attributes:
        efficiency: the baseline's throughput on all devices, for each of them, over this one; `efficiency_ci`: its 95 % interval,
            which a later run will be in. Both are None where the baseline was not measured in a round with it.
        speedup: the answer's throughput on all devices over this one; `speedup_ci`: its 95 % interval. Both are None where the
            answer was not measured in a round with it.
        failure: why it has no figures; empty where it has.
    """

    efficiency: float | None = None
    efficiency_ci: tuple[float, float] | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """One process that evaluated in batches of `eval_batch_size` samples.

    Attributes:
        kind: how it ended, in the words of `outcome.Kind`; where it failed, `cause` says why.
        fits: whether it ran, within the memory limit less headroom.
        samples_per_s, samples_per_s_ci, peak_bytes: None where it failed.
    """

    eval_batch_size: int
    kind: str
    fits: bool
    samples_per_s: float | None = None
    samples_per_s_ci: tuple[float, float] | None = None
    peak_bytes: int | None = None
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The batch size with which the answer's techniques evaluate fastest: forward passes without gradients.

    Attributes:
        eval_batch_size: the smallest batch size that is as fast as the fastest one; None where none was found, and then all
            figures are None.
        peak_bytes: peak of its processes. Each took a training step of a few samples first, so the optimizer's state counts.
        num_processes: fresh processes behind the figures.
        tried: every process, in order.
        unfinished: why no more was tried; empty where enough is known.
    """

    eval_batch_size: int | None = None
    samples_per_s: float | None = None
    samples_per_s_ci: tuple[float, float] | None = None
    peak_bytes: int | None = None
    num_processes: int = 0
    tried: tuple[Evaluated, ...] = ()
    unfinished: str = ""


def pareto_front(items: Iterable[T], point: Callable[[T], tuple[float, ...]]) -> list[T]:
    """The items that no other one beats, by increasing memory.

    One beats another when it needs no more memory, is no slower and, where energy counts, takes no more of it, and is better in
    one of these. Of equal ones the first is kept.

    Args:
        point: (memory, throughput) of an item, or (memory, throughput, energy); more of the second and less of the others is better.
    """
    front: list[tuple[tuple[float, ...], T]] = []
    costs = [((memory, -speed, *energy), item) for item in items for memory, speed, *energy in [point(item)]]
    for cost, item in sorted(costs, key=lambda one: one[0]):  # what beats another comes before it
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in front):
            front.append((cost, item))
    return [item for _, item in front]


class Figures(Protocol):
    """What the front is of."""

    @property
    def peak_bytes(self) -> int:
        """The most memory held."""

    @property
    def samples_per_s(self) -> float:
        """Throughput."""

    @property
    def joules_per_sample(self) -> float | None:
        """Energy; None where it is not known."""


def front_by(items: Iterable[T], figures: Callable[[T], Figures]) -> list[T]:
    """The items that no other beats in both memory and throughput, or in energy either where that is known of all; by increasing memory."""
    found = [(item, figures(item)) for item in items]
    joules = [one.joules_per_sample for _, one in found if one.joules_per_sample is not None]
    if len(joules) < len(found):
        front = pareto_front(found, lambda one: (one[1].peak_bytes, one[1].samples_per_s))
    else:
        front = pareto_front(
            found, lambda one: (one[1].peak_bytes, one[1].samples_per_s, one[1].joules_per_sample or 0.0)
        )
    return [item for item, _ in front]


def front_of(measured: Iterable[Measured]) -> tuple[Measured, ...]:
    """The configs on the front, by increasing memory."""
    return tuple(front_by(measured, lambda one: one))


def round_effects(logs: Mapping[K, Mapping[int, float]]) -> dict[int, float]:
    """By how much each round's logarithms lie above the other rounds'; these effects add up to zero.

    Fits log = config + round by medians in turn (Tukey's median polish, Exploratory Data Analysis, 1977, chapter 10).
    A config may have missed any of the rounds.

    Args:
        logs: config -> round -> logarithm of what was measured.
    """
    numbers = sorted({number for values in logs.values() for number in values})
    effects = dict.fromkeys(numbers, 0.0)
    for _ in range(MOST_POLISHES):
        before = effects
        levels = {k: median(value - effects[n] for n, value in values.items()) for k, values in logs.items() if values}
        effects = {n: median(values[n] - levels[k] for k, values in logs.items() if n in values) for n in numbers}
        level = fmean(effects.values()) if effects else 0.0
        effects = {number: effect - level for number, effect in effects.items()}
        if all(abs(effects[number] - before[number]) < SETTLED for number in numbers):
            break
    return effects
