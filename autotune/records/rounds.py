"""What each round of repeated measurements as a whole was above or below the others: other samples, the machine's mood."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import fmean, median
from typing import TypeVar

MOST_POLISHES = 50
SETTLED = 1e-5  # a polish settles at once where every round holds every config, and by halves where few rounds do

K = TypeVar("K", bound=Hashable)


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
