"""The terms of a cost, fitted to probes: the core of the time model, and of the memory model where nothing can be traced.

Bases and effects have normal priors; they are fitted by Gauss-Newton steps, with Student weights so that one disturbed
probe does not bend everything, and their uncertainty is Laplace's approximation. What they leave over is a Gaussian
process. Source: Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), section 2.7 (explicit basis
functions), whose basis is here the terms' linearisation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from autotune.prediction import Array
from autotune.prediction.cost_terms import Layout, Residual
from autotune.records.config import Config
from autotune.records.outcome import Outcome

Probes = Sequence[tuple[Config, Outcome]]
RESIDUAL_FACTORS = ((0.5, 0.2), (1.0, 0.4), (2.0, 0.2), (4.0, 0.12), (8.0, 0.08))  # with prior weights
STUDENT_FREEDOM = 4.0  # degrees of freedom of the noise: an outlier of six standard deviations counts an eighth
TERM_NOISE = 0.35  # standard deviation of what is measured of a term alone
MAX_STEPS = 12  # of Gauss-Newton
LARGEST_STEP = 2.0  # of a parameter, in logarithms
SETTLED = 1e-4  # a step this small changes nothing
SETTLED_WEIGHT = 1e-2
FARTHEST = 1e3  # standard deviations from what is expected to a bound


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
            information = self._layout.precision + self._whitened_slopes.T @ self._whitened_slopes
            moment = self._layout.precision @ self._layout.mean + self._whitened_slopes.T @ aim
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
