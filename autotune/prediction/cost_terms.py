"""A cost as a sum of terms, each a product of factors: what is known of step time and memory before a model is seen.

The logarithm of a config's cost is `log(sum over terms of exp(base + effects of its choices + scale))` plus a residual.
The terms say what is known (a share that shrinks with the batch size, a technique that acts on one term alone), the
residual's kernel how large and how alike the departures are that nobody knows (caches, interactions).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import numpy as np

from autotune.prediction import Array
from autotune.records.config import BATCH_KEYS, Choice, Config
from autotune.space import Space
from autotune.techniques import Factor

CATEGORY_CORRELATION = 0.3  # between effects of a technique's choices without an order
RANK_CORRELATION = 0.85  # between neighbours on a scale
UNLIKE = 0.55  # correlation that is left between residuals of configs that differ in one technique which does much
MUCH = 0.15  # standard deviation, in logarithms, of an effect on the first term that makes a technique one of those
OCTAVES = 1.5  # over which departures stay alike
LITTLE = 0.2  # as much unlike, at the least, does any other technique make two configs


@dataclass(frozen=True, kw_only=True)
class CostTerm:
    """One summand of the cost, relative to the first term at the baseline.

    Attributes:
        name: the factor of a choice's `Expectation` that acts on it.
        scale: its size at a batch size, samples per step and width of the samples in a batch, relative to the baseline's:
            (batch ratio, samples ratio, width ratio) -> factor.
        share: its prior, relative to the first term; of the first term itself, in units of cost.
    """

    name: str
    scale: Callable[[Array, Array, Array], Array]
    share: Factor


@dataclass(frozen=True, kw_only=True)
class Residual:
    """Standard deviations, in logarithms, of what the terms do not explain.

    Attributes:
        trend: per doubling of the batch size, the same for all techniques.
        bend: departures from that trend, the same for all techniques.
        group: departures of one combination of techniques, at one batch size or all.
        own: departures of one config alone, which no other config shares.
    """

    trend: float
    bend: float
    group: float
    own: float
    sizes: float = 1.0  # factor on what follows the batch size: `trend` and `bend`
    groups: float = 1.0  # factor on what combinations of techniques do: `group` and `own`


@dataclass(frozen=True)
class Design:
    """Configs as arrays. `m` configs, `q` terms, `p` parameters.

    Attributes:
        scales: (m, q) logarithms of the terms' scales.
        features: (m, q, p) which parameters act on which term.
        octaves: (m,) log2 of the batch size over the baseline's.
        ranks: (m, techniques) places of the choices, for the residual's kernel.
        untraced: (m, choices) standard deviation of what a choice that is switched on does to memory that no trace shows.
    """

    scales: Array
    features: Array
    octaves: Array
    ranks: Array
    untraced: Array

    def row(self, index: int) -> Design:
        """One config alone."""
        one = slice(index, index + 1)
        return Design(**{field.name: getattr(self, field.name)[one] for field in fields(self)})

    def shares(self, parameters: Array) -> Array:
        """Each term's share of the cost, (m, q)."""
        logs = self.scales + self.features @ parameters
        shares = np.exp(logs - logs.max(axis=1, keepdims=True))
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))

    def linearised(self, parameters: Array) -> tuple[Array, Array]:
        """Logarithm of the cost (m,) and its derivatives (m, p)."""
        logs = self.scales + self.features @ parameters
        top = logs.max(axis=1, keepdims=True)
        shares = np.exp(logs - top)
        total = shares.sum(axis=1, keepdims=True)
        value = (top + np.log(total))[:, 0]
        return value, np.einsum("mq,mqp->mp", shares / total, self.features)


class Layout:
    """Which parameter is what: the terms' bases, then one effect for each term, technique and choice that acts on it.

    Args:
        width: of a sample in a micro batch of a size, in any unit; the same for all where it is not given.
        compute: what computing in a type does to the term of that name, where it is better known than a technique expects.
    """

    def __init__(
        self,
        terms: Sequence[CostTerm],
        space: Space,
        width: Callable[[int], float] = lambda batch_size: 1.0,
        compute: Mapping[str, Factor] = MappingProxyType({}),
    ) -> None:
        self.terms = terms
        self.space = space
        self._width = functools.cache(width)
        self._searched = [name for name, choices in space.choices.items() if len(choices) > 1]
        self._reach = dict.fromkeys(self._searched, LITTLE)
        self._untraced: dict[tuple[str, Choice], float] = {}
        self._position: dict[tuple[str, Choice], list[tuple[int, int]]] = {}  # (term, parameter) of each choice
        means = [math.log(term.share.typical) for term in terms]
        blocks = [np.array([[math.log(term.share.spread) ** 2]]) for term in terms]
        for name in self._searched:
            if name in BATCH_KEYS:  # acts through the terms' scales
                continue
            technique = space.techniques[name]
            active = [choice for choice in space.choices[name] if choice != technique.off]
            expected = [space.expectation(technique, choice) for choice in active]
            known = [compute.get(technique.arithmetic(choice)) for choice in active]
            expected = [replace(e, compute=k) if k else e for e, k in zip(expected, known, strict=True)]
            spreads = {(name, c): math.log(e.untraced.spread) for c, e in zip(active, expected, strict=True)}
            self._untraced |= {switch: spread for switch, spread in spreads.items() if spread}
            for number, term in enumerate(terms):
                factors = [getattr(expectation, term.name) for expectation in expected]
                if all(factor == Factor() for factor in factors):
                    continue
                for offset, choice in enumerate(active):
                    self._position.setdefault((name, choice), []).append((number, len(means) + offset))
                means += [math.log(factor.typical) for factor in factors]
                stds = np.log([factor.spread for factor in factors])
                if number == 0:
                    self._reach[name] = float(np.clip(stds.max() / MUCH, LITTLE, 1.0))
                blocks.append(np.outer(stds, stds) * _correlation(len(active), ordered=technique.ordered))
        from scipy.linalg import block_diag

        self.mean = np.array(means)
        self.covariance = np.asarray(block_diag(*blocks))
        self.precision = np.asarray(np.linalg.inv(self.covariance + 1e-10 * np.eye(len(self.mean))))

    def terms_of(self, name: str) -> list[int]:
        """The numbers of the terms on which a technique acts."""
        return sorted({term for (other, _), acts in self._position.items() if other == name for term, _ in acts})

    def design(self, configs: Sequence[Config]) -> Design:
        """The configs as arrays."""
        count, num_terms = len(configs), len(self.terms)
        features = np.zeros((count, num_terms, len(self.mean)))
        features[:, :, :num_terms] = np.eye(num_terms)
        features[:, :, 0] = 1.0  # every term is relative to the first
        ranks = np.zeros((count, len(self._searched)))
        rows = [config.as_dict() for config in configs]
        batch = np.array([choices["batch_size"] for choices in rows], dtype=float)
        samples = batch * np.array([choices["accumulation_steps"] for choices in rows], dtype=float)
        untraced = np.zeros((count, len(self._untraced)))
        places = [
            _places(self.space.choices[name], ordered=self.space.techniques.is_ordered(name)) for name in self._searched
        ]
        for row, choices in enumerate(rows):
            untraced[row] = [std * (choices[name] == choice) for (name, choice), std in self._untraced.items()]
            for column, name in enumerate(self._searched):
                choice = choices[name]
                ranks[row, column] = places[column].get(choice, -1.0)
                for term, parameter in self._position.get((name, choice), ()):
                    features[row, term, parameter] = 1.0
        baseline = self.space.baseline
        batch_ratio, samples_ratio = batch / baseline.batch_size, samples / baseline.samples_per_step
        widths = np.array([self._width(int(size)) for size in batch]) / self._width(baseline.batch_size)
        scales = np.stack([np.log(term.scale(batch_ratio, samples_ratio, widths)) for term in self.terms], axis=1)
        return Design(scales=scales, features=features, octaves=np.log2(batch_ratio), ranks=ranks, untraced=untraced)

    def kernel(self, residual: Residual, a: Design, b: Design) -> Array:
        """Covariance of the residual between two lists of configs."""
        sizes, groups = self.kernels(residual, a, b)
        return np.asarray(residual.sizes**2 * sizes + residual.groups**2 * groups)

    def kernels(self, residual: Residual, a: Design, b: Design) -> tuple[Array, Array]:
        """The same before its factors: what follows the batch size, and what combinations of techniques do."""
        sizes = residual.trend**2 * np.outer(a.octaves, b.octaves) + residual.bend**2 * _nearness(a, b)
        likeness = self.likeness(a, b)
        return sizes, residual.group**2 * likeness + residual.own**2 * (likeness == 1)

    def likeness(self, a: Design, b: Design) -> Array:
        """Correlation of what combinations of techniques do: 1 for a config and itself."""
        unlike = np.zeros((len(a.octaves), len(b.octaves)))
        for column, name in enumerate(self._searched):
            if name in BATCH_KEYS:
                continue
            distance = np.abs(a.ranks[:, None, column] - b.ranks[None, :, column])
            unlike += self._reach[name] * (distance if self.space.techniques.is_ordered(name) else distance > 0)
        # half of a group's departure is the same at every batch size
        return np.asarray(UNLIKE**unlike * (0.5 + 0.5 * _nearness(a, b)))

    def variance(self, residual: Residual, a: Design) -> Array:
        """The kernel's diagonal."""
        sizes = residual.trend**2 * a.octaves**2 + residual.bend**2
        return np.asarray(residual.sizes**2 * sizes + residual.groups**2 * (residual.group**2 + residual.own**2))


def _nearness(a: Design, b: Design) -> Array:
    """Of batch sizes. Rough, since caches and kernels change from one size to the next."""
    return np.asarray(np.exp(-np.abs(a.octaves[:, None] - b.octaves[None, :]) / OCTAVES))


def _correlation(count: int, *, ordered: bool) -> Array:
    ranks = np.arange(count)
    distance = np.abs(ranks[:, None] - ranks[None, :])
    return np.asarray(RANK_CORRELATION**distance if ordered else np.where(distance == 0, 1.0, CATEGORY_CORRELATION))


def _places(choices: Sequence[Choice], *, ordered: bool) -> dict[Choice, float]:
    """Where each choice lies: from 0 to 1 on a scale, in no order otherwise."""
    last = max(1, len(choices) - 1)
    return {choice: place / last if ordered else float(place) for place, choice in enumerate(choices)}
