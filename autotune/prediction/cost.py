"""A cost as a sum of terms, each a product of factors: what is known of step time and memory before a model is seen, fitted to probes.

It is the core of the time model, and of the memory model where nothing can be traced.

The logarithm of a config's cost is `log(sum over terms of exp(base + effects of its choices + scale))` plus a residual.
The terms say what is known (a share that shrinks with the batch size, a technique that acts on one term alone), the
residual's kernel how large and how alike the departures are that nobody knows (caches, interactions).

Bases and effects have normal priors; they are fitted by Gauss-Newton steps, with Student weights so that one disturbed
probe does not bend everything, and their uncertainty is Laplace's approximation. What they leave over is a Gaussian
process. Source: Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), section 2.7 (explicit basis
functions), whose basis is here the terms' linearisation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

import numpy as np

from autotune.prediction import Array
from autotune.prediction.pooling import EFFECT, SHARE, Learned, Parameter, Said, pool
from autotune.records.config import ACCUMULATION, BATCH_KEYS, BATCH_SIZE, Choice, Config
from autotune.records.outcome import Outcome
from autotune.space import Space
from autotune.techniques import Factor

RESIDUAL_FACTORS = ((0.5, 0.2), (1.0, 0.4), (2.0, 0.2), (4.0, 0.12), (8.0, 0.08))  # with prior weights
STUDENT_FREEDOM = 4.0  # degrees of freedom of the noise: an outlier of six standard deviations counts an eighth
TERM_NOISE = 0.35  # standard deviation of what is measured of a term alone
VAGUE = 100.0  # standard deviation of the share that is expected of a term, once it was measured alone
MAX_STEPS = 12  # of Gauss-Newton
LARGEST_STEP = 2.0  # of a parameter, in logarithms
SETTLED = 1e-4  # a step this small changes nothing
SETTLED_WEIGHT = 1e-2
TELLING = 0.95  # of a parameter's prior variance: observations that leave more say next to nothing of it
FARTHEST = 1e3  # standard deviations from what is expected to a bound
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
        said: what other studies say of parameters.
        probed: configs that may have choices which the space has not: it has one alone of what the user fixed, and none that failed
            its comparison with plain fp32.
    """

    def __init__(
        self,
        terms: Sequence[CostTerm],
        space: Space,
        width: Callable[[int], float] = lambda batch_size: 1.0,
        compute: Mapping[str, Factor] = MappingProxyType({}),
        said: Mapping[Parameter, Sequence[Said]] = MappingProxyType({}),
        probed: Iterable[Config] = (),
    ) -> None:
        self.terms = terms
        self.space = space
        self._choices = _choices_of(space, [space.baseline, *probed])
        self._width = functools.cache(width)
        self._searched = [name for name, choices in self._choices.items() if len(choices) > 1]
        self._reach = dict.fromkeys(self._searched, LITTLE)
        self._untraced: dict[tuple[str, Choice], float] = {}
        self._position: dict[tuple[str, Choice], list[tuple[int, int]]] = {}  # (term, parameter) of each choice
        self.parameters: list[Parameter] = [(term.name, "", "") for term in terms]
        shares = [pool(term.share, said.get((term.name, "", ""), ()), SHARE) for term in terms]
        means = [math.log(share.typical) for share in shares]
        blocks = [np.array([[math.log(share.spread) ** 2]]) for share in shares]
        for name in self._searched:
            if name in BATCH_KEYS:  # acts through the terms' scales
                continue
            technique = space.techniques[name]
            active = [choice for choice in self._choices[name] if choice != technique.off]
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
                keys: list[Parameter] = [(term.name, name, choice) for choice in active]
                self.parameters += keys
                factors = [pool(factor, said.get(key, ()), EFFECT) for key, factor in zip(keys, factors, strict=True)]
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
        rows, num_terms = [config.as_dict() for config in configs], len(self.terms)
        features = np.zeros((len(configs), num_terms, len(self.mean)))
        features[:, :, :num_terms] = np.eye(num_terms)
        features[:, :, 0] = 1.0  # every term is relative to the first
        ranks = np.zeros((len(configs), len(self._searched)))
        untraced = np.zeros((len(configs), len(self._untraced)))
        switches = list(self._untraced)
        for column, name in enumerate(self._searched):
            choices = self._choices[name]
            number_of = {choice: number for number, choice in enumerate(choices)}
            numbers = np.array([number_of.get(row[name], -1) for row in rows], dtype=int)
            last = max(1, len(choices) - 1) if self.space.techniques.is_ordered(name) else 1  # a scale is from 0 to 1
            ranks[:, column] = np.where(numbers < 0, -1.0, numbers / last)
            for number, choice in enumerate(choices):
                has_it = numbers == number
                for term, parameter in self._position.get((name, choice), ()):
                    features[has_it, term, parameter] = 1.0
                if (name, choice) in self._untraced:
                    untraced[has_it, switches.index((name, choice))] = self._untraced[name, choice]
        batch = np.array([row[BATCH_SIZE] for row in rows], dtype=float)
        samples = batch * np.array([row[ACCUMULATION] for row in rows], dtype=float)
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


def _choices_of(space: Space, configs: Iterable[Config]) -> dict[str, tuple[Choice, ...]]:
    """The choices of each technique that the space has or a config has, in the technique's order."""
    found = dict(space.choices)
    for name in found.keys() - BATCH_KEYS:
        known = space.techniques[name].choices
        place = {choice: number for number, choice in enumerate(known)}
        every = dict.fromkeys((*found[name], *(config[name] for config in configs)))
        if len(every) > len(found[name]):
            found[name] = tuple(sorted(every, key=lambda choice: place.get(choice, len(known))))
    return found


def _nearness(a: Design, b: Design) -> Array:
    """Of batch sizes. Rough, since caches and kernels change from one size to the next."""
    return np.asarray(np.exp(-np.abs(a.octaves[:, None] - b.octaves[None, :]) / OCTAVES))


def _correlation(count: int, *, ordered: bool) -> Array:
    ranks = np.arange(count)
    distance = np.abs(ranks[:, None] - ranks[None, :])
    return np.asarray(RANK_CORRELATION**distance if ordered else np.where(distance == 0, 1.0, CATEGORY_CORRELATION))


Probes = Sequence[tuple[Config, Outcome]]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One probe. All in logarithms.

    Attributes:
        value: of the cost.
        noise: standard deviation within the probe, what differs between processes apart.
        terms: term's name -> what was measured of it alone.
    """

    config: Config
    value: float
    noise: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Posterior:
    """The posterior of the log cost of a list of configs.

    Attributes:
        covariance_with: returns the covariance of every config with the one at an index.
    """

    mean: Array
    variance: Array
    covariance_with: Callable[[int], Array]


@dataclass(frozen=True)
class Scales:
    """How large noise and residual are: learned, on a grid, from how well the probes agree with each other.

    Attributes:
        noise: (standard deviation between processes, prior weight) pairs.
        outliers: whether an observation far off the others counts less.
    """

    noise: tuple[tuple[float, float], ...]
    outliers: bool = True


class CostModel:
    """The model, fitted to observations. A new object for every new observation; fitting takes milliseconds."""

    def __init__(
        self, layout: Layout, residual: Residual, scales: Scales, observations: Sequence[Observation] = ()
    ) -> None:
        self._layout = layout
        self._scales = scales
        self._prior_residual = residual
        self._take(observations)
        self.residual = residual
        stds, weights = np.array(scales.noise).T
        self.noise = math.exp(weights @ np.log(stds) / weights.sum())
        self._parameters = layout.mean.copy()
        if len(self._values):
            self._parameters[0] = float(np.median(self._values))
            self._step_until_settled()
            self._learn_scales()
        self._step_until_settled()

    def posterior(self, configs: Sequence[Config]) -> Posterior:
        """The posterior of configs, observed or not."""
        design = self._layout.design(configs)
        value, slopes = design.linearised(self._parameters)
        explained = np.zeros((len(configs), 0))
        if len(self._values):
            across = self._layout.kernel(self.residual, design, self._design)
            explained = np.linalg.solve(self._root, across.T).T
            value = value + explained @ self._whitened_residuals
            slopes = slopes - explained @ self._whitened_slopes
        effects = slopes @ self._spread
        prior = self._layout.variance(self.residual, design)
        variance = prior - (explained**2).sum(axis=1) + (effects**2).sum(axis=1)

        def covariance_with(index: int) -> Array:
            kernel = self._layout.kernel(self.residual, design, design.row(index))[:, 0]
            return np.asarray(kernel - explained @ explained[index] + effects @ effects[index])

        return Posterior(value, variance, covariance_with)

    def learned(self) -> dict[Parameter, Learned]:
        """What the observations alone say of each parameter.

        The prior is taken out of the posterior, both normal: precisions are subtracted. Left out are the first term, which is in units
        of cost, and parameters of which the observations say next to nothing.
        """
        prior, posterior = self._prior_variances, (self._spread**2).sum(axis=1)
        found = {}
        for place, name in enumerate(self._layout.parameters[1:], start=1):
            if posterior[place] < TELLING * prior[place]:
                precision = 1 / posterior[place] - 1 / prior[place]
                moment = self._parameters[place] / posterior[place] - self._layout.mean[place] / prior[place]
                found[name] = Learned(mean=float(moment / precision), variance=float(1 / precision))
        return found

    def log_evidence(self, scales_of: CostModel) -> float:
        """Logarithm of how likely the priors make the observations, up to a constant, with the model linearised at its fit.

        Args:
            scales_of: the model whose noise and residual are taken, so that none is excused by how much it leaves over.

        Source: Rasmussen and Williams (2006), section 2.7 (marginal likelihood with explicit basis functions).
        """
        value, slopes = self._design.linearised(self._parameters)
        deviations = self._values - value + slopes @ (self._parameters - self._layout.mean)
        noise = self._layout.kernel(scales_of.residual, self._design, self._design)
        noise = noise + np.diag(self._within + scales_of.noise**2)
        if len(self._alone_values):
            slopes = np.concatenate([slopes, self._alone_features])
            of_terms = self._alone_values - self._alone_features @ self._layout.mean
            deviations = np.concatenate([deviations, of_terms])
            noise = np.pad(noise, (0, len(of_terms)))
            noise[-len(of_terms) :, -len(of_terms) :] = TERM_NOISE**2 * np.eye(len(of_terms))
        root = np.linalg.cholesky(slopes @ self._layout.covariance @ slopes.T + noise)
        return -0.5 * float((np.linalg.solve(root, deviations) ** 2).sum()) - float(np.log(np.diag(root)).sum())

    def with_bound(self, config: Config, least: float) -> CostModel:
        """The model that knows, too, that a config's log cost is more than `least`."""
        posterior = self.posterior([config])
        value, noise = beyond(float(posterior.mean[0]), float(posterior.variance[0]) + self.noise**2, least)
        if not math.isfinite(noise):
            return self
        bound = Observation(config=config, value=value, noise=math.sqrt(noise))
        return CostModel(self._layout, self._prior_residual, self._scales, [*self._observations, bound])

    def reach(self, config: Config, name: str) -> float:
        """Share of a config's cost in terms on which a technique acts."""
        shares = self._layout.design([config]).shares(self._parameters)[0]
        return float(shares[self._layout.terms_of(name)].sum())

    def without(self, row: int) -> CostModel:
        """The model as it would be without one of its observations; noise and residual stay as large as they were found."""
        new = copy(self)
        new._take([o for place, o in enumerate(self._observations) if place != row])
        new._step_until_settled()
        return new

    def _take(self, observations: Sequence[Observation]) -> None:
        self._observations = tuple(observations)
        self._design = self._layout.design([o.config for o in observations])
        self._values = np.array([o.value for o in observations])
        self._within = np.array([o.noise for o in observations]) ** 2
        names = [term.name for term in self._layout.terms]
        alone = [
            (row, names.index(name), value) for row, o in enumerate(observations) for name, value in o.terms.items()
        ]
        self._alone_features = np.array([self._design.features[row, term] for row, term, _ in alone])
        self._alone_values = np.array([value - self._design.scales[row, term] for row, term, value in alone])
        # Else a share far below the expected one (batches that are made ahead) would be put down to the other terms as well.
        measured = [term for _, term, _ in alone]
        self._precision, self._prior_variances = self._layout.precision.copy(), np.diag(self._layout.covariance).copy()
        self._precision[measured, measured], self._prior_variances[measured] = VAGUE**-2, VAGUE**2

    def _step_until_settled(self) -> None:
        """Gauss-Newton: each step is a generalised least-squares fit of the model linearised at the last one."""
        weights = np.ones(len(self._values))
        for _ in range(MAX_STEPS):
            value, slopes = self._design.linearised(self._parameters)
            noise = (self._within + self.noise**2) / weights
            covariance = self._layout.kernel(self.residual, self._design, self._design) + np.diag(noise)
            self._root = np.linalg.cholesky(covariance)
            self._whitened_slopes = np.linalg.solve(self._root, slopes)
            aim = np.linalg.solve(self._root, self._values - value + slopes @ self._parameters)
            information = self._precision + self._whitened_slopes.T @ self._whitened_slopes
            moment = self._precision @ self._layout.mean + self._whitened_slopes.T @ aim
            if len(self._alone_values):
                weighted = self._alone_features.T / TERM_NOISE**2
                information += weighted @ self._alone_features
                moment += weighted @ self._alone_values
            step = np.linalg.solve(information, moment) - self._parameters
            length = float(np.abs(step).max())
            self._parameters = self._parameters + step * min(1.0, LARGEST_STEP / max(length, SETTLED))
            self._whitened_residuals = aim - self._whitened_slopes @ self._parameters
            misfit = noise * np.linalg.solve(self._root.T, self._whitened_residuals)  # what is taken for noise
            before = weights
            if self._scales.outliers:
                weights = student_weights(misfit, self._within + self.noise**2)
            if length < SETTLED and np.abs(weights - before).max(initial=0.0) < SETTLED_WEIGHT:
                break
        self._spread = np.linalg.cholesky(np.linalg.inv(information))

    def _learn_scales(self) -> None:
        """Noise and residual, averaged over a grid by how likely they make the observations (linearised at the fit)."""
        value, slopes = self._design.linearised(self._parameters)
        deviations = self._values - value + slopes @ (self._parameters - self._layout.mean)
        shared = slopes @ self._layout.covariance @ slopes.T
        sizes, groups = self._layout.kernels(self.residual, self._design, self._design)
        grid = np.array(list(itertools.product(RESIDUAL_FACTORS, RESIDUAL_FACTORS, self._scales.noise)))
        within = shared + np.diag(self._within)
        of_sizes, of_groups, noise = likely_scales(grid, deviations, within, sizes, groups, np.eye(len(within)))
        self.noise = noise
        self.residual = replace(self.residual, sizes=of_sizes, groups=of_groups)


def likely_scales(grid: Array, deviations: Array, within: Array, *scaled: Array) -> list[float]:
    """Geometric means of a grid of scales, by how likely they make deviations with covariance `within + sum(scale^2 * scaled)`.

    Args:
        grid: (points, scales, 2) each scale and its prior weight.
    """
    scales, weights = grid[:, :, 0], grid[:, :, 1].prod(axis=1)
    roots = np.linalg.cholesky(within + np.einsum("ps,sij->pij", scales**2, np.array(scaled)))
    whitened = np.linalg.solve(roots, np.broadcast_to(deviations[:, None], (len(grid), len(within), 1)))[:, :, 0]
    log_roots = np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(axis=1)
    logs = np.log(weights) - 0.5 * (whitened**2).sum(axis=1) - log_roots
    chances = np.exp(logs - logs.max())
    return [float(scale) for scale in np.exp(chances @ np.log(scales) / chances.sum())]


def student_weights(misfit: Array, variance: Array) -> Array:
    """How much each observation counts, at most 1: iteratively reweighted least squares for Student's t distribution.

    Source: Lange, Little and Taylor, Robust Statistical Modeling Using the t Distribution (JASA, 1989).
    """
    return np.asarray(np.minimum(1.0, (STUDENT_FREEDOM + 1) / (STUDENT_FREEDOM + misfit**2 / variance)))


def beyond(mean: float, variance: float, least: float) -> tuple[float, float]:
    """A normal observation (value, variance) that says the same as `the figure is more than least`.

    The moments of the truncated normal are matched, as in expectation propagation: Rasmussen and Williams (2006),
    section 3.6. The variance is infinite where that is nothing new.
    """
    from scipy.special import erfcx

    std = math.sqrt(variance)
    z = max((mean - least) / std, -FARTHEST)  # further out the figures below are lost in rounding
    ratio = math.sqrt(2 / math.pi) / float(erfcx(-z / math.sqrt(2)))  # the inverse Mills ratio
    new_mean = mean + std * ratio
    new_variance = variance * (1 - ratio * (ratio + z))
    if new_variance >= variance * (1 - 1e-6):
        return mean, math.inf
    noise = 1 / (1 / new_variance - 1 / variance)
    return noise * (new_mean / new_variance - mean / variance), noise
