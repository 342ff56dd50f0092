"""What the memory limit is about, before it is run: a traced peak and what probes say is added to it, or probes alone.

On a CPU that is the data of the whole process, on a GPU what the caching allocator reserves and what lies outside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autotune.predict.array import Array
from autotune.predict.cost_fit import CostModel, Observation, Scales
from autotune.predict.cost_terms import CostTerm, Design, Layout, Residual, SpaceLike
from autotune.predict.footprint import Breakdown, TracedPeak
from autotune.predict.lengths import LengthDistribution
from autotune.records.config import Config
from autotune.records.outcome import Kind, Outcome
from autotune.techniques import Factor
from autotune.units import MIB

Probes = Sequence[tuple[Config, Outcome]]

Z95 = 1.96

# Of a traced config: peak = outside + fixed + (1 + share) x traced + kept x allocated volume, with standard deviations.
FIXED_BYTES, FIXED_STD_BYTES = 32 * MIB, 24 * MIB  # buffers of libraries, made when training begins
SHARE, SHARE_STD = 0.02, 0.06  # of the traced peak: the allocator's rounding and fragments
# of the allocated volume: what a heap cannot use again. With glibc's posix_memalign, a hole is too small for the next tensor of the
# same size; 0.15 and 0.20 of a micro batch's allocated volume stayed with a transformer and a convolutional network
KEPT, KEPT_STD = 0.18, 0.05
GROUP_STD = 0.04  # of what is held for tensors, for each combination of techniques: workspaces inside operators
GROUP_STDS = ((GROUP_STD, 0.9), (0.3, 0.07), (1.2, 0.03))  # with prior weights
# what one choice makes a process hold beside all that is traced (compiled kernels of many shapes), as a share of what
# the probes hold, with prior weights; times the choice's own spread
UNTRACED_STDS = ((0.03, 0.6), (0.3, 0.2), (1.0, 0.1), (3.0, 0.1), (9.0, 0.05))
PROBE_STD = 0.02  # of what is held for tensors, from one process to the next
PROBE_STD_BYTES = 4 * MIB

# Of an untraced one: what does not depend on the batch size, and what does.
TERMS = (
    CostTerm(name="activations", scale=lambda b, s, w: b, effect=lambda e: e.activations, share=Factor(spread=1e3)),
    CostTerm(
        name="state",
        scale=lambda b, s, w: np.ones_like(b),
        effect=lambda e: e.state,
        share=Factor(typical=0.5, spread=4.0),
    ),
)
RESIDUAL = Residual(trend=0.03, bend=0.03, group=0.08, own=0.01)
# what takes far more memory than others really does
SCALES = Scales(noise=((0.01, 0.5), (0.02, 0.3), (0.04, 0.2)), outliers=False)
# A failed allocation that exceeds the expected peak by more is some request of its own, of which the model knows nothing.
LARGEST_SURPRISE = 5.0
LARGEST_BYTES = 2**62  # a figure beyond says only that nothing is known; it fits a 64-bit integer
FARTHEST = 1e3  # standard deviations from what is expected to a bound
BEYOND, BEYOND_STD = 0.7, 0.6  # how far beyond the limit, in logarithms, a config is where only failures are known


class PeakSource(Protocol):
    """Where traced peaks come from, and what else is known of a task without running it."""

    @property
    def lengths(self) -> LengthDistribution | None:
        """Of the training set's samples, where they are known."""

    def peak(self, config: Config) -> TracedPeak | None:
        """The allocator's peak of a config; None when it could not be traced."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of a config, comparable with the memory limit.

    Attributes:
        peak_bytes: median; `low_bytes` and `high_bytes` bound 95 %.
        log_std: standard deviation of its logarithm.
        breakdown: of what the allocator holds at the peak, where the config was traced.
    """

    peak_bytes: int
    log_std: float
    breakdown: Breakdown | None = None

    @property
    def low_bytes(self) -> int:
        """Lower end of the 95 % interval."""
        return int(self.peak_bytes * math.exp(-Z95 * self.log_std))

    @property
    def high_bytes(self) -> int:
        """Upper end of the 95 % interval."""
        log_high = math.log(max(1, self.peak_bytes)) + Z95 * self.log_std
        if log_high > math.log(LARGEST_BYTES):
            return max(self.peak_bytes, LARGEST_BYTES)
        return int(self.peak_bytes * math.exp(Z95 * self.log_std))

    def chance_within(self, limit_bytes: float) -> float:
        """Probability that the peak is at most `limit_bytes`."""
        if limit_bytes <= 0 or self.peak_bytes <= 0 or self.log_std <= 0:
            return float(self.peak_bytes <= limit_bytes)
        return normal_cdf((math.log(limit_bytes) - math.log(self.peak_bytes)) / self.log_std)


class MemoryModel:
    """Peak memory of any config of a space.

    Args:
        peaks: traced peaks, or None where the model cannot be traced.
        outside_bytes: what a process holds before the model is built, on the scale of the limit.
    """

    def __init__(self, peaks: PeakSource | None, outside_bytes: int, space: SpaceLike, probes: Probes = ()) -> None:
        self._peaks = peaks
        self._outside_bytes = outside_bytes
        self._space = space
        self._traced: _Traced | None = None
        if peaks is not None and not _are_refuted(peaks, probes):
            self._traced = _Traced(peaks, outside_bytes, space, probes)
        self._untraced = _Untraced(outside_bytes, space, probes)

    def fitted(self, probes: Probes) -> MemoryModel:
        """A new model that has seen exactly these probes; what ran out of memory is evidence, too."""
        return MemoryModel(self._peaks, self._outside_bytes, self._space, probes)

    def estimate(self, config: Config) -> MemoryEstimate | None:
        """The peak of a config; None where it was not traced and no probe has told anything yet."""
        return self.estimates([config])[0]

    def estimates(self, configs: Sequence[Config]) -> list[MemoryEstimate | None]:
        """The peak of each config."""
        found: list[MemoryEstimate | None] = [None] * len(configs)
        if self._traced is not None:
            found = self._traced.estimates(configs)
        rest = [row for row, estimate in enumerate(found) if estimate is None]
        for row, estimate in zip(rest, self._untraced.estimates([configs[row] for row in rest]), strict=True):
            found[row] = estimate
        return found


class _Traced:
    """A line from traced peaks to the process's, and departures from it that similar configs share in part."""

    def __init__(self, peaks: PeakSource, outside_bytes: int, space: SpaceLike, probes: Probes) -> None:
        self._peaks = peaks
        self._outside_bytes = outside_bytes
        self._layout = Layout(TERMS, space)
        self._group_std, self._untraced_std_bytes = GROUP_STD, 0.0
        seen = [(peak, config, outcome) for config, outcome in probes if (peak := peaks.peak(config))]
        exact = [(p, c, o.measurement.peak_bytes) for p, c, o in seen if o.measurement is not None]
        failed = [
            (p, c, min(_least_bytes(o), outside_bytes + int(LARGEST_SURPRISE * _line([p])[0])))
            for p, c, o in seen
            if o.kind is Kind.OOM and _least_bytes(o)
        ]
        surprises = [(p, c, least) for p, c, least in failed if least - outside_bytes > _line([p])[0]]
        self._take([*exact, *surprises])
        self._learn_scales()
        self._take(exact)
        for trace, config, least in failed:
            self._add_beyond(trace, config, least - outside_bytes)

    def estimates(self, configs: Sequence[Config]) -> list[MemoryEstimate | None]:
        traces = [self._peaks.peak(config) for config in configs]
        known = [(t, c) for t, c in zip(traces, configs, strict=True) if t is not None]
        if not known:
            return [None] * len(configs)
        mean, variance = self._predict([t for t, _ in known], [c for _, c in known])
        filled = iter(zip(known, mean, variance, strict=True))
        return [None if trace is None else self._estimate(*next(filled)) for trace in traces]

    def _estimate(self, known: tuple[TracedPeak, Config], mean: float, variance: float) -> MemoryEstimate:
        trace = known[0]
        least = self._outside_bytes + trace.breakdown.parameters_bytes
        peak = max(least, self._outside_bytes + mean)
        return MemoryEstimate(
            peak_bytes=int(peak),
            log_std=math.sqrt(max(0.0, variance) + self._noise_of(trace)) / peak,
            breakdown=trace.breakdown,
        )

    def _take(self, found: Sequence[tuple[TracedPeak, Config, int]]) -> None:
        self._traces = [trace for trace, _, _ in found]
        self._configs = [config for _, config, _ in found]
        self._values = [float(peak_bytes - self._outside_bytes) for _, _, peak_bytes in found]
        self._noise = [self._noise_of(trace) for trace in self._traces]

    def _learn_scales(self) -> None:
        """From how well the fit does: a library may hold far more for a choice or a group than anything that is traced."""
        if not self._values:
            return
        design = self._layout.design(self._configs)
        typical_bytes = float(_held(self._traces).mean())
        grid = list(itertools.product(GROUP_STDS, UNTRACED_STDS))
        logs = []
        for (self._group_std, group_weight), (share, weight) in grid:
            self._untraced_std_bytes = share * typical_bytes
            kernel = self._kernel(self._traces, design, self._traces, design)
            root = np.linalg.cholesky(kernel + np.diag(self._noise))
            whitened = np.linalg.solve(root, np.array(self._values) - _line(self._traces))
            log_likelihood = -0.5 * float(whitened @ whitened) - float(np.log(np.diag(root)).sum())
            logs.append(math.log(group_weight * weight) + log_likelihood)
        weights = np.exp(np.array(logs) - max(logs))
        stds = np.log([(group, share) for (group, _), (share, _) in grid])
        self._group_std, share = np.exp(weights @ stds / weights.sum())
        self._untraced_std_bytes = share * typical_bytes

    def _predict(self, traces: Sequence[TracedPeak], configs: Sequence[Config]) -> tuple[Array, Array]:
        """Mean and variance of the peak less what is outside, one process's noise apart."""
        mean = _line(traces)
        design = self._layout.design(configs)
        variance = (
            (_features(traces) ** 2).sum(axis=1)
            + (self._group_std * _held(traces)) ** 2
            + (self._untraced_std_bytes) ** 2 * (design.untraced**2).sum(axis=1)
        )
        if self._values:
            seen = self._layout.design(self._configs)
            kernel = self._kernel(self._traces, seen, self._traces, seen)
            root = np.linalg.cholesky(kernel + np.diag(self._noise))
            shared = self._kernel(self._traces, seen, traces, design)
            across = np.linalg.solve(root, shared)
            mean = mean + across.T @ np.linalg.solve(root, np.array(self._values) - _line(self._traces))
            variance = variance - (across**2).sum(axis=0)
        return mean, variance

    def _kernel(self, a: Sequence[TracedPeak], a_design: Design, b: Sequence[TracedPeak], b_design: Design) -> Array:
        likeness = self._layout.likeness(RESIDUAL, a_design, b_design)
        shared = a_design.untraced @ b_design.untraced.T
        of_line = _features(a) @ _features(b).T
        return np.asarray(
            of_line
            + np.outer(_held(a), _held(b)) * self._group_std**2 * likeness
            + (self._untraced_std_bytes) ** 2 * shared
        )

    def _noise_of(self, trace: TracedPeak) -> float:
        """Variance of one process's peak around the line."""
        held_share = math.hypot(PROBE_STD, trace.uncertainty)
        return float(PROBE_STD_BYTES**2 + (held_share * _held([trace])[0]) ** 2)

    def _add_beyond(self, trace: TracedPeak, config: Config, least: float) -> None:
        mean, variance = self._predict([trace], [config])
        value, noise = beyond(float(mean[0]), float(variance[0]) + self._noise_of(trace), least)
        if math.isfinite(noise):
            self._traces.append(trace)
            self._configs.append(config)
            self._values.append(value)
            self._noise.append(noise)


def _are_refuted(peaks: PeakSource, probes: Probes) -> bool:
    """Whether a probe took so much less than was traced that traces tell nothing: they are interpolated in the batch."""
    return any(
        outcome.measurement is not None
        and (peak := peaks.peak(config)) is not None
        and LARGEST_SURPRISE * outcome.measurement.peak_bytes < _line([peak])[0]
        for config, outcome in probes
    )


def _sizes(traces: Sequence[TracedPeak]) -> Array:
    return np.array([trace.peak_bytes for trace in traces], dtype=float)


def _volumes(traces: Sequence[TracedPeak]) -> Array:
    return np.array([trace.volume_bytes for trace in traces], dtype=float)


def _held(traces: Sequence[TracedPeak]) -> Array:
    """What a process is expected to hold for its tensors."""
    return np.asarray((1 + SHARE) * _sizes(traces) + KEPT * _volumes(traces))


def _line(traces: Sequence[TracedPeak]) -> Array:
    """What a process with a traced peak is expected to hold, less what is outside."""
    return np.asarray(FIXED_BYTES + _held(traces))


def _features(traces: Sequence[TracedPeak]) -> Array:
    """What the line's three figures multiply, times how little they are known: (traces, 3)."""
    fixed = np.full(len(traces), float(FIXED_STD_BYTES))
    return np.column_stack([fixed, SHARE_STD * _sizes(traces), KEPT_STD * _volumes(traces)])


class _Untraced:
    """State and activations learned from probes alone."""

    def __init__(self, outside_bytes: int, space: SpaceLike, probes: Probes) -> None:
        self._outside_bytes = outside_bytes
        layout = Layout(TERMS, space)
        seen = [
            Observation(config=c, value=self._log(o.measurement.peak_bytes), noise=0.0, terms={})
            for c, o in probes
            if o.measurement is not None
        ]
        failed = [(c, _least_bytes(o)) for c, o in probes if o.kind is Kind.OOM and _least_bytes(o)]
        if not seen and failed:  # a first idea of how large everything is
            config, least = min(failed, key=lambda pair: pair[1])
            seen = [Observation(config=config, value=self._log(least) + BEYOND, noise=BEYOND_STD, terms={})]
        self._any = bool(seen)
        self._model = CostModel(layout, RESIDUAL, SCALES, seen)
        for config, least in failed:
            posterior = self._model.posterior([config])
            variance = float(posterior.variance[0]) + self._model.noise**2
            value, noise = beyond(float(posterior.mean[0]), variance, self._log(least))
            if math.isfinite(noise):
                seen.append(Observation(config=config, value=value, noise=math.sqrt(noise), terms={}))
                self._model = CostModel(layout, RESIDUAL, SCALES, seen)

    def estimates(self, configs: Sequence[Config]) -> list[MemoryEstimate | None]:
        if not self._any or not configs:
            return [None] * len(configs)
        posterior = self._model.posterior(configs)
        found: list[MemoryEstimate | None] = []
        for mean, variance in zip(posterior.mean, posterior.variance, strict=True):
            trained = math.exp(min(mean, math.log(LARGEST_BYTES)))
            peak = self._outside_bytes + trained
            log_std = math.sqrt(max(0.0, variance) + self._model.noise**2) * trained / peak
            found.append(MemoryEstimate(peak_bytes=int(peak), log_std=log_std))
        return found

    def _log(self, peak_bytes: float) -> float:
        return math.log(max(peak_bytes - self._outside_bytes, 0.02 * peak_bytes))


def beyond(mean: float, variance: float, least: float) -> tuple[float, float]:
    """A normal observation (value, variance) that says the same as `the figure is more than least`.

    The moments of the truncated normal are matched, as in expectation propagation: Rasmussen and Williams (2006),
    section 3.6. The variance is infinite where nothing new is said.
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


def normal_cdf(z: float) -> float:
    """Probability that a standard normal is at most `z`."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _least_bytes(outcome: Outcome) -> int:
    """What a config that ran out of memory needs at the least; 0 when it was not told."""
    return outcome.peak_bytes + outcome.attempted_bytes
