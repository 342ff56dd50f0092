"""What the play-off's figures say of two configs: one variance for all who play, and the chances that follow from it.

The logarithm of a process's figure is taken as config + round + noise, with one variance for every config. It is learned
from all pairs of equal probes, those of the search among them, beside a prior: how much processes differ on machines that were
seen. A difference is then a mixture of normal distributions, one for each variance that is plausible (Gelman et al., Bayesian Data
Analysis, 3rd edition, sections 5.7 and 14.2; a weakly informative prior counts where there are few pairs). A process that other work
disturbed has a variance of its own beside that, so it weighs little where others tell more (weighted least squares, section 14.7
there).

The play-off's estimate of a gain weighs everything that is known, so by itself it may be more than any process showed. Users
are told the nearest to that estimate which was measured: each speed lies within those of its config's processes, and a gain is
the ratio of two such speeds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from autotune.records.config import Config

Array = NDArray[np.float64]
Key = Hashable
Cell = tuple[Key, int]  # a config in a round
Range = tuple[float, float]  # least and most

# Of the standard deviation between equal processes, before any pair was seen: the likeliest, and how far its logarithm is spread below
# and above that. So its median is 0.04, and one in eight is above 0.2. Ten searches of 45 s on one processor saw 0.01 to 0.28, with a
# median of 0.03; four of twelve on another saw 0.1 and more.
PRIOR_STD, PRIOR_LOG_STDS = 0.08, (2.0, 1.0)
STDS = np.exp(np.linspace(math.log(1e-4), math.log(10.0), 120))  # a grid of standard deviations
SEARCH_DF = 4.0  # of a pair of the search's figures: now and then the machine changes between them
NORMALS, SPREADS = 160, 48  # quantiles that stand for a distribution
SEARCH = -1  # the round that the search counts as
NORMAL_BELOW = 0.8413  # share of a normal distribution below its mean and one standard deviation


@dataclass(frozen=True)
class Searched:
    """The figure of a config in the search, in logarithms.

    Attributes:
        bar: below this figure it would not have been chosen to play; None where it plays whatever its figure was.
        unrest: how far a disturbance may have moved it; 0 where none was seen.
    """

    log: float
    bar: float | None = None
    unrest: float = 0.0


class Distribution:
    """What is known of a logarithm: values and their weights."""

    def __init__(self, values: Array, weights: Array) -> None:
        order = np.argsort(values, axis=None)
        self._values, weights = values.ravel()[order], weights.ravel()[order]
        self._up_to = np.cumsum(weights) / weights.sum()
        self.mean = float(np.average(self._values, weights=weights))

    def quantile(self, share: float) -> float:
        """The value that the logarithm is below with this chance."""
        return float(np.interp(share, self._up_to, self._values))

    @property
    def std(self) -> float:
        """Half of the width that holds the middle 68 %, which is the standard deviation of a normal one."""
        return (self.quantile(NORMAL_BELOW) - self.quantile(1 - NORMAL_BELOW)) / 2

    def chance_below(self, value: float) -> float:
        """The chance that the logarithm is below a value."""
        return float(np.interp(value, self._values, self._up_to, left=0.0, right=1.0))

    def upside_seen(self, share: float, *, least: float = 0.0, doubts: float = 0.0) -> float:
        """The expected logarithm that one will choose, once a share of its variance is known; what is not chosen counts as 0.

        The mean that will then be expected varies as the logarithm does, with that share of its variance (the preposterior
        analysis of Raiffa and Schlaifer, Applied Statistical Decision Theory, 1961, section 5.4).

        Args:
            least: chosen is what is then expected to be above this by so many of the standard deviations that are left.
            doubts: that number.
        """
        weights = np.diff(self._up_to, prepend=0.0)
        expected = self.mean + math.sqrt(share) * (self._values - self.mean)
        left = math.sqrt((1 - share) * float(np.sum(weights * (self._values - self.mean) ** 2)))
        return float(np.sum(weights * expected * (expected > least + doubts * left)))

    def ratio(self, confidence: float = 0.95) -> tuple[float, float, float]:
        """What the logarithm stands for: expected, with an interval."""
        tail = (1 - confidence) / 2
        return math.exp(self.mean), math.exp(self.quantile(tail)), math.exp(self.quantile(1 - tail))


class Evidence:
    """Figures of configs by round, and what they say.

    Args:
        logs: logarithms of each config by round of the play-off; a config may have missed any of them.
        searched: what the search had found of them, and of configs that have not played. A disturbed figure counts only where
            one of the two compared has not played.
        unrest: standard deviation of what disturbances add, by config and round; what is not named was not disturbed.
    """

    def __init__(
        self,
        logs: Mapping[Key, Mapping[int, float]],
        searched: Mapping[Key, Searched],
        unrest: Mapping[Key, Mapping[int, float]] = MappingProxyType({}),
    ) -> None:
        self._logs = {key: values for key, values in logs.items() if values}
        self._all_searched = dict(searched)
        self._searched = {key: found for key, found in searched.items() if key in self._logs and not found.unrest}
        self._unrest = {(key, n): std for key, by_round in unrest.items() for n, std in by_round.items() if std > 0}
        if not _calm(self._logs, self._unrest) and _least_squares(self._logs).df:
            self._unrest = {}  # a machine that is always disturbed: that is its noise
        self._place = {key: place for place, key in enumerate(self._logs)}
        self._noises: dict[frozenset[Key], Noise] = {}  # by whose search figures count
        self._fits: dict[float, _Fit] = {}  # of the play-off's figures alone, by the noise

    @cached_property
    def levels(self) -> dict[Key, float]:
        """The level of each config: its mean logarithm, with the mood of the machine in each round taken out."""
        return dict(zip(self._logs, self._played(self.middle).levels.tolist(), strict=True))

    @cached_property
    def std(self) -> float:
        """The standard deviation between equal processes that nothing disturbed, as it is expected to be after all pairs."""
        return self._noise(self._searched).std

    @property
    def middle(self) -> float:
        """The median of what that standard deviation may be."""
        return self._noise(self._searched).middle

    def differ_by_more_than(self, log: float) -> bool:
        """Whether equal processes were seen to differ, and that more likely than not by more than this, in standard deviations."""
        return self._noise(self._searched).df > 0 and self.middle > log

    def _played(self, std: float) -> _Fit:
        if std not in self._fits:
            self._fits[std] = _least_squares(self._logs, self._unrest, std)
        return self._fits[std]

    def share_of_rounds(self, a: Key, b: Key, num_rounds: int) -> float:
        """The share of the variance of `difference` that so many more rounds will tell, as least squares has it."""
        if not {a, b} <= self._logs.keys():
            return num_rounds / (num_rounds + 1)
        fit, std = self._played(self.middle), self.middle
        scale = float(fit.stds(self._place[a], self._place[b], np.asarray(std))) / std
        return num_rounds / (num_rounds + 2 / scale**2) if scale else 0.0

    def _noise(self, searched: Mapping[Key, Searched]) -> Noise:
        key = frozenset(searched)
        if key not in self._noises:
            self._noises[key] = Noise.of(_calm(*self._with_the_search(searched)))
        return self._noises[key]

    def difference(self, a: Key, b: Key) -> Distribution:
        """What is known of log `a` - log `b`.

        The search's figures count as well. A figure for whose height a config was chosen to play counts with the likelihood of a
        figure above the bar, so that luck is not taken for speed (Zöllner and Pritchard, Overcoming the winner's curse,
        American Journal of Human Genetics 80, 2007). For a config that has not played, the search's figure is all there is.
        """
        if not {a, b} <= self._logs.keys():
            return self._difference_in_the_search(a, b)
        i, j = self._place[a], self._place[b]
        found = [self._searched.get(key) for key in (a, b)]
        others = {key: seen for key, seen in self._searched.items() if None in found or key not in (a, b)}
        noise = self._noise(others)
        fit, stds = self._played(noise.middle), noise.stds[:, None]
        values = fit.levels[i] - fit.levels[j] + fit.stds(i, j, stds) * _normals()
        first, second = found
        if first is None or second is None:
            return Distribution(values, np.ones_like(values))
        return Distribution(values, _likelihood(first, second, values, math.sqrt(2) * stds))

    def _difference_in_the_search(self, a: Key, b: Key) -> Distribution:
        """`difference` where one has not played: the search counts as a round, whose mood is known from those who played."""
        from scipy.special import log_ndtr

        unplayed = {key: self._all_searched[key] for key in (a, b) if key not in self._logs}
        played = {key: found for key, found in self._all_searched.items() if key in self._logs}
        logs, unrest = self._with_the_search(played | unplayed)
        noise = Noise.of(_calm(logs, unrest))
        fit, keys = _least_squares(logs, unrest, noise.middle), [*self._logs, *unplayed]
        i, j = keys.index(a), keys.index(b)
        stds = fit.stds(i, j, noise.stds[:, None])
        off = stds * _normals()
        likely = np.zeros_like(off)
        for sign, found in ((1, unplayed.get(a)), (-1, unplayed.get(b))):
            if found is not None and found.bar is not None:  # its figure had to be above the bar
                likely -= log_ndtr((found.log - found.bar + sign * off) / stds)
        return Distribution(fit.levels[i] - fit.levels[j] + off, np.exp(likely - likely.max()))

    def _with_the_search(
        self, searched: Mapping[Key, Searched]
    ) -> tuple[dict[Key, dict[int, float]], dict[Cell, float]]:
        """The play-off's figures and the search's, which count as one more round; and how far disturbances moved which of them."""
        found = {key: {SEARCH: seen.log} for key, seen in searched.items()}
        unrest = {(key, SEARCH): seen.unrest for key, seen in searched.items() if seen.unrest}
        logs = {key: {**self._logs.get(key, {}), **found.get(key, {})} for key in {**self._logs, **found}}
        return logs, self._unrest | unrest


def _calm(logs: Mapping[Key, Mapping[int, float]], unrest: Mapping[Cell, float]) -> dict[Key, dict[int, float]]:
    """The figures that nothing disturbed."""
    calm = {key: {n: log for n, log in values.items() if (key, n) not in unrest} for key, values in logs.items()}
    return {key: values for key, values in calm.items() if values}


def _likelihood(first: Searched, second: Searched, difference: Array, std: Array) -> Array:
    """The likelihood of two figures of the search, given the true difference and that each had to be above its bar.

    They were taken at different times, so they may be far off: Student's distribution makes little of such a pair.
    """
    from scipy.special import stdtr

    off = (first.log - second.log - difference) / std
    logs = -(SEARCH_DF + 1) / 2 * np.log1p(off**2 / SEARCH_DF) - np.log(std)
    if first.bar is not None:
        logs -= np.log(stdtr(SEARCH_DF, (difference - (first.bar - second.log)) / std))
    if second.bar is not None:
        logs -= np.log(stdtr(SEARCH_DF, (first.log - second.bar - difference) / std))
    return np.asarray(np.exp(logs - logs.max()))


@dataclass(frozen=True)
class _Fit:
    """Least squares of config + round.

    Attributes:
        coefficients: of each figure in each level, which is linear in them.
        unrest: how far a disturbance may have moved each figure, as a standard deviation.
        squares: the sum of squares that is left over, with its degrees of freedom `df`.
    """

    levels: Array
    coefficients: Array
    unrest: Array
    squares: float
    df: int

    def stds(self, i: int, j: int, noise: Array) -> Array:
        """The standard deviation of the difference between two levels where equal processes differ by `noise`, disturbances included."""
        shares = self.coefficients[i] - self.coefficients[j]
        return np.asarray(np.sqrt(noise**2 * np.sum(shares**2) + np.sum((shares * self.unrest) ** 2)))


def _least_squares(
    logs: Mapping[Key, Mapping[int, float]], unrest: Mapping[Cell, float] = MappingProxyType({}), std: float = 1.0
) -> _Fit:
    """Fit figures that weigh by their variances: that between equal processes, `std` squared, and what disturbances add."""
    rounds = sorted({number for values in logs.values() for number in values})
    cells = [(key, i, rounds.index(n), n) for i, (key, values) in enumerate(logs.items()) for n in values]
    design = np.zeros((len(cells), len(logs) + len(rounds)))
    for row, (_, i, place, _) in enumerate(cells):
        design[row, i] = design[row, len(logs) + place] = 1.0
    figures = np.array([logs[key][n] for key, _, _, n in cells])
    more = np.array([unrest.get((key, n), 0.0) for key, _, _, n in cells])
    weight = std**2 / (std**2 + more**2)
    coefficients = np.linalg.pinv(design.T * weight @ design, hermitian=True) @ (design.T * weight)
    effects = coefficients @ figures
    squares = float(np.sum(weight * (figures - design @ effects) ** 2))
    num = len(logs)
    df = len(cells) - int(np.linalg.matrix_rank(design)) if cells else 0
    return _Fit(effects[:num], np.asarray(coefficients[:num]), more, squares, df)


@dataclass(frozen=True)
class Noise:
    """What is known of the standard deviation between equal processes.

    Attributes:
        std: the root of the expected variance.
        middle: the median of the standard deviation; `stds` are quantiles of it, of equal weight.
        df: the degrees of freedom that were seen.
    """

    std: float
    middle: float
    stds: Array
    df: int

    @classmethod
    def of(cls, logs: Mapping[Key, Mapping[int, float]]) -> Noise:
        """From the figures of configs by round."""
        fit = _least_squares(logs)
        return _noise_of(fit.squares if fit.df else 0.0, fit.df)


@lru_cache(maxsize=256)
def _noise_of(squares: float, df: int) -> Noise:
    """What so many squares of so many degrees of freedom say, after what is known beforehand."""
    off, (calmer, noisier) = np.log(STDS / PRIOR_STD), PRIOR_LOG_STDS
    prior = -0.5 * (off / np.where(off < 0, calmer, noisier)) ** 2
    logs = prior - df * np.log(STDS) - 0.5 * squares / STDS**2
    weights = np.exp(logs - logs.max())
    up_to = (np.cumsum(weights) - 0.5 * weights) / weights.sum()
    stds = np.exp(np.interp((np.arange(SPREADS) + 0.5) / SPREADS, up_to, np.log(STDS)))
    return Noise(std=float(np.sqrt(np.mean(stds**2))), middle=float(np.median(stds)), stds=stds, df=df)


@lru_cache(maxsize=1)
def _normals() -> Array:
    """Quantiles of the normal distribution, of equal weight."""
    from scipy.special import ndtri

    return np.asarray(ndtri((np.arange(NORMALS) + 0.5) / NORMALS))


def within_measured(
    measured: Mapping[Config, Range], base: Config, level: float, gains: Mapping[Config, float]
) -> dict[Config, float]:
    """The logarithm of the speed that is told of each config.

    Args:
        measured: the range of the logarithms that the processes of each config measured.
        base: the config that gains are over; `level` is the mean of its own logarithms.
        gains: the estimated gain of each config over it, in logarithms, the most important first: where not all of them can
            be told at once, as when a config ran only while the machine was fast, the first ones are.

    Returns:
        Levels whose differences to that of `base` are the gains, as far as the ranges allow.
    """
    least, most = measured[base]
    for config, gain in gains.items():
        edges = [edge - gain for edge in measured[config]]
        least, most = (_clip(edge, (least, most)) for edge in edges)  # the nearest, where no level suits both
    level = _clip(level, (least, most))
    return {base: level} | {config: _clip(level + gain, measured[config]) for config, gain in gains.items()}


def _clip(value: float, within: Range) -> float:
    return min(max(value, within[0]), within[1])
