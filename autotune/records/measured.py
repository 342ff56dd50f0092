"""Configs with what fresh processes found them to do, in training and where they evaluate; the best of them, and how rounds differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from autotune.records.config import Choice
from autotune.records.formats import Record

# every room takes its intervals of 95 % from this one
NORMAL_95 = 1.96  # standard deviations of a normal distribution, on either side of the mean, that hold 95 % of it
MOST_POLISHES = 50
SETTLED = 1e-5  # a polish settles at once where every round holds every config, and by halves where few rounds do

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A config and what fresh processes found it to do. `samples_per_s_ci` is a 95 % interval (low, high)."""

    config: dict[str, Choice]
    samples_per_s: float
    samples_per_s_ci: tuple[float, float]
    peak_bytes: int
    step_s: float
    num_processes: int  # fresh processes behind the figures


@dataclass(frozen=True, kw_only=True)
class Dropped(Measured):
    """A config that failed in the play-off, with the figures of its processes that ran through: zeros where none did."""

    dropped: str  # why


@dataclass(frozen=True, kw_only=True)
class Rival(Measured):
    """The best of those that played against a baseline that is kept, with its throughput over the baseline's."""

    speedup: float
    speedup_ci: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """One process that evaluated in batches of `eval_batch_size` samples.

    Attributes:
        kind: how it ended, as an outcome's; `cause` says why, where it failed.
        fits: it ran, within the memory limit less headroom.
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
        eval_batch_size: the smallest of those that are as fast as the fastest; None where none was found, and so are all
            figures.
        peak_bytes: of its processes. Each took a training step of a few samples first, so the optimizer's state counts.
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


def pareto_front(items: Iterable[T], point: Callable[[T], tuple[float, float]]) -> list[T]:
    """The items that no other one beats, by increasing memory.

    One beats another when it needs no more memory and is no slower, and is better in one of the two. Of equal ones the
    first is kept.

    Args:
        point: (memory, throughput) of an item; less of the first and more of the second is better.
    """
    front: list[T] = []
    for item in sorted(items, key=lambda one: (point(one)[0], -point(one)[1])):
        if not front or point(item)[1] > point(front[-1])[1]:
            front.append(item)
    return front


def front_of(measured: Iterable[Measured]) -> tuple[Measured, ...]:
    """The configs that no other beats in both memory and throughput, by increasing memory."""
    return tuple(pareto_front(measured, lambda one: (one.peak_bytes, one.samples_per_s)))


def round_effects(logs: Mapping[K, Mapping[int, float]]) -> dict[int, float]:
    """By how much each round's logarithms are above the rest's; they add up to zero.

    With log = config + round, fitted by medians in turn (Tukey's median polish, Exploratory Data Analysis, 1977,
    chapter 10). A config may have missed any of the rounds.

    Args:
        logs: of each config, by round.
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
