"""What the memory limit is about, before it is run: a traced peak and what probes say is added to it, or probes alone.

On a CPU that is the data of the whole process, on a GPU what the caching allocator reserves and what lies outside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autotune.devices import capabilities_of
from autotune.prediction import Array
from autotune.prediction.cost import (
    CostModel,
    CostTerm,
    Layout,
    Observation,
    Probes,
    Residual,
    Scales,
    beyond,
    likely_scales,
)
from autotune.prediction.kept_for_shapes import KeptForShapes
from autotune.prediction.traces import Group, TracedPeak, Traces
from autotune.records.capacity import Breakdown
from autotune.records.config import Config
from autotune.records.device import NO_COMMUNICATORS, Communicators
from autotune.records.measured import NORMAL_95
from autotune.records.outcome import Kind, Outcome
from autotune.space import Space
from autotune.techniques import Factor
from autotune.units import MIB

PeakBytes = Sequence[tuple[Config, int]]
OutsideOf = Callable[[Config], int]  # bytes that a process holds beside what is traced
UnsureOf = Callable[[Config], float]  # standard deviation of these bytes
# config and trace, bytes less what is outside, variance of the noise
Seen = tuple[tuple[Config, TracedPeak], float, float]

SHARE_STD = 0.06  # of the traced peak
# of the allocated volume: what a heap cannot use again. With glibc's posix_memalign, a hole is too small for the next tensor of the
# same size; 0.15 and 0.20 of a micro batch's allocated volume stayed with a transformer and a convolutional network
KEPT, KEPT_STD = 0.18, 0.05
# times as much of what is allocated to gather parameters: each block's lie between activations that stay. With eight to 32 blocks of
# 2 and 8 million parameters in two processes 0.72 to 0.80 of that volume stayed
GATHERED_TIMES = 4.2
GROUP_STD = 0.04  # of what is held for tensors, for each combination of techniques: workspaces inside operators
GROUP_STDS = ((GROUP_STD, 0.9), (0.3, 0.07), (1.2, 0.03))  # with prior weights
# what one choice makes a process hold beside all that is traced (compiled kernels of many shapes), as a share of what
# the probes hold, with prior weights; times the choice's own spread
UNTRACED_STDS = ((0.03, 0.6), (0.3, 0.2), (1.0, 0.1), (3.0, 0.1), (9.0, 0.05))
# Of what is held for tensors, from one process to the next: 0 to 0.5 % seen with linear layers, 5 % with convolutions. glibc
# takes freed blocks of up to 32 MiB from a heap then, and which holes stay in it turns on the smallest allocation beside them:
# convolutions peaked 9 % apart so, and to the MiB alike where MALLOC_MMAP_THRESHOLD_ kept tensors out of the heap.
PROBE_STD = 0.04
PROBE_STD_BYTES = 4 * MIB

# An untraced peak consists of what grows with the batch size, and what does not.
TERMS = (
    CostTerm(name="activations", scale=lambda b, s, w: b, share=Factor(spread=1e3)),
    CostTerm(name="state", scale=lambda b, s, w: np.ones_like(b), share=Factor(typical=0.5, spread=4.0)),
)
RESIDUAL = Residual(trend=0.03, bend=0.03, group=0.08, own=0.01)
# what takes far more memory than others really does
SCALES = Scales(noise=((0.01, 0.5), (0.02, 0.3), (0.04, 0.2)), outliers=False)
# A failed allocation that exceeds the expected peak by more is some request of its own, of which the model knows nothing.
LARGEST_SURPRISE = 5.0
LARGEST_BYTES = 2**62  # a figure beyond says only that nothing is known; it fits a 64-bit integer
# of micro batches that count for what libraries keep: more would rule out a type that no probe has tried, in a model that uses few kernels
MOST_SHAPES = 16.0
BEYOND, BEYOND_STD = 0.7, 0.6  # how far beyond the limit, in logarithms, a config is where only failures are known


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
        return int(self.peak_bytes * math.exp(-NORMAL_95 * self.log_std))

    @property
    def high_bytes(self) -> int:
        """Upper end of the 95 % interval."""
        log_factor = min(NORMAL_95 * self.log_std, math.log(LARGEST_BYTES))
        return max(self.peak_bytes, min(LARGEST_BYTES, int(self.peak_bytes * math.exp(log_factor))))

    def chance_within(self, limit_bytes: float) -> float:
        """Probability that the peak is at most `limit_bytes`."""
        if limit_bytes <= 0 or self.peak_bytes <= 0 or self.log_std <= 0:
            return float(self.peak_bytes <= limit_bytes)
        z = (math.log(limit_bytes) - math.log(self.peak_bytes)) / self.log_std
        return 0.5 * math.erfc(-z / math.sqrt(2))

    def agrees_with(self, other: MemoryEstimate) -> bool:
        """Whether another estimate of the same config lies within the 95 % interval of their difference."""
        apart = math.log(self.peak_bytes) - math.log(other.peak_bytes)
        return abs(apart) <= NORMAL_95 * math.hypot(self.log_std, other.log_std)

    def pooled(self, other: MemoryEstimate) -> MemoryEstimate:
        """Pool this estimate with another one of the same config; each is weighed by its precision."""
        weights = [1 / one.log_std**2 for one in (self, other)]
        mean = sum(w * math.log(one.peak_bytes) for w, one in zip(weights, (self, other), strict=True)) / sum(weights)
        return replace(self, peak_bytes=int(math.exp(mean)), log_std=sum(weights) ** -0.5)


class MemoryModel:
    """Peak memory of any config of a space, from traces and the probes so far; what ran out of memory is evidence, too.

    Args:
        peaks: traced peaks, or None where the model cannot be traced.
        outside_bytes: what a process holds before the model is built, on the scale of the limit.
        communicators: what it holds beside that in a world; what the probes saw of them is added.
        gradients_bytes: of all trained parameters, where that is known. Processes that share parameters out keep them whole while they
            accumulate.
    """

    def __init__(
        self,
        peaks: Traces | None,
        outside_bytes: int,
        space: Space,
        probes: Probes = (),
        communicators: Communicators = NO_COMMUNICATORS,
        gradients_bytes: int = 0,
    ) -> None:
        num_shards = partial(space.techniques.num_shards, world=space.world)
        for seen in (seen for _, outcome in probes if (seen := outcome.communicators_seen)):
            communicators = communicators.seen(*seen)

        def outside_of(config: Config) -> int:
            return outside_bytes + communicators.bytes_of(space.techniques.num_communicators(config, space.world))

        num_shapes = [o.measurement.num_shapes_expected for _, o in probes if o.measurement is not None]
        most_shapes = min(max([1.0, *num_shapes]), MOST_SHAPES)
        on_processors = peaks is not None and not capabilities_of(peaks.target).own_allocator

        kept = KeptForShapes(space.techniques, probes if on_processors else ())

        def outside_with_choices(config: Config) -> int:
            if not on_processors:
                return outside_of(config)
            known = kept.of(config)
            untraced_bytes = space.techniques.untraced_bytes(config, most_shapes if known is None else 0.0)
            return outside_of(config) + untraced_bytes + (0 if known is None else round(known.num_bytes))

        def unsure_of(config: Config) -> float:
            return 0.0 if (known := kept.of(config)) is None else known.std_bytes

        def untraced_outside_of(config: Config) -> int:
            whole = gradients_bytes if config.accumulation_steps > 1 else 0
            return outside_with_choices(config) + whole - whole // num_shards(config)

        measured = [
            (config, round(m.long_run_peak_bytes + kept.missing_bytes(config, m)))
            for config, outcome in probes
            if (m := outcome.measurement) is not None
        ]
        # the least that a config needs, where that is known
        failed = [(c, least) for c, o in probes if o.measurement is None and (least := _least_bytes(o))]
        layout = Layout(TERMS, space, probed=[config for config, _ in (*measured, *failed)])
        self._traced: _Traced | None = None
        self.traced_groups: tuple[Group, ...] = () if peaks is None else tuple(peaks.models)
        if peaks is not None:
            line = ON_CPU if on_processors else ON_GPU

            def peak_of(config: Config) -> TracedPeak | None:
                trace = peaks.peak(config, space.techniques)
                if trace is None or num_shards(config) == 1:
                    return trace
                more_bytes = (GATHERED_TIMES - 1) * trace.fixed_volume_bytes
                return replace(trace, volume_bytes=round(trace.volume_bytes + more_bytes))

            traced = [(trace, held) for config, held in measured if (trace := peak_of(config))]
            # where a probe took so much less, traces tell nothing: they are interpolated in the batch size
            if all(LARGEST_SURPRISE * held >= line.total_bytes(trace) for trace, held in traced):
                self._traced = _Traced(peak_of, line, outside_with_choices, unsure_of, layout, measured, failed)
        self._untraced: _Untraced | None = _Untraced(untraced_outside_of, unsure_of, layout, measured, failed)

    def of_traces_alone(self) -> MemoryModel:
        """The model that knows nothing of what was not traced."""
        new = copy(self)
        new._untraced = None
        return new

    def estimate(self, config: Config) -> MemoryEstimate | None:
        """The peak of a config; None where it was not traced and no probe has ended yet."""
        return self.estimates([config])[0]

    def estimates(self, configs: Sequence[Config]) -> list[MemoryEstimate | None]:
        """The peak of each config."""
        found = self._traced.estimates(configs) if self._traced is not None else {}
        if self._untraced is not None:
            found |= self._untraced.estimates([config for config in configs if config not in found])
        return [found.get(config) for config in configs]


@dataclass(frozen=True, kw_only=True)
class _Line:
    """What a process is expected to hold: outside + fixed + (1 + share) x traced + kept x allocated volume.

    Attributes:
        fixed_bytes: buffers of libraries, made when training begins.
        fixed_std_bytes: standard deviation of that; a GPU's libraries load kernels late, too.
        share: of the traced peak, for an allocator's rounding and fragments.
    """

    fixed_bytes: int
    fixed_std_bytes: int
    share: float

    def held_bytes(self, trace: TracedPeak) -> float:
        """For tensors."""
        return (1 + self.share) * trace.peak_bytes + KEPT * trace.volume_bytes

    def total_bytes(self, trace: TracedPeak) -> float:
        """All but what is outside."""
        return self.fixed_bytes + self.held_bytes(trace)

    def noise(self, trace: TracedPeak) -> float:
        """Variance of one process's peak around the line."""
        return float(PROBE_STD_BYTES**2 + (math.hypot(PROBE_STD, trace.uncertainty) * self.held_bytes(trace)) ** 2)


ON_CPU = _Line(fixed_bytes=32 * MIB, fixed_std_bytes=24 * MIB, share=0.02)
# torch's allocator is simulated, workspaces included
ON_GPU = _Line(fixed_bytes=0, fixed_std_bytes=128 * MIB, share=0.0)


class _Rows:
    """Traced configs as arrays.

    Attributes:
        line: what a process is expected to hold, less what is outside.
        held: for tensors, of that.
        features: (configs, 3) what the line's three figures multiply, times how little they are known.
    """

    def __init__(self, layout: Layout, found: Sequence[tuple[Config, TracedPeak]], line: _Line) -> None:
        self.design = layout.design([config for config, _ in found])
        self.held = np.array([line.held_bytes(trace) for _, trace in found])
        self.line = line.fixed_bytes + self.held
        stds = [(line.fixed_std_bytes, SHARE_STD * t.peak_bytes, KEPT_STD * t.volume_bytes) for _, t in found]
        self.features = np.array(stds, dtype=float).reshape(-1, 3)


class _Traced:
    """A line from traced peaks to the process's, and departures from it that similar configs share in part."""

    def __init__(
        self,
        peak_of: Callable[[Config], TracedPeak | None],
        line: _Line,
        outside_of: OutsideOf,
        unsure_of: UnsureOf,
        layout: Layout,
        measured: PeakBytes,
        failed: PeakBytes,
    ) -> None:
        self._peak_of, self._line, self._outside_of, self._unsure_of = peak_of, line, outside_of, unsure_of
        self._layout = layout
        self._group_std, self._untraced_std_bytes = GROUP_STD, 0.0
        exact = self._seen_of(measured)
        out_of_memory = [
            (known, min(least, LARGEST_SURPRISE * line.total_bytes(known[1])), noise)
            for known, least, noise in self._seen_of(failed)
        ]
        surprises = [row for row in out_of_memory if row[1] > line.total_bytes(row[0][1])]
        self._take([*exact, *surprises])
        self._learn_scales()
        self._take(exact)
        for known, least, noise in out_of_memory:
            mean, variance = self._predict([known])
            value, bound_noise = beyond(float(mean[0]), float(variance[0]) + noise, least)
            if math.isfinite(bound_noise):
                exact.append((known, value, bound_noise))
                self._take(exact)

    def estimates(self, configs: Sequence[Config]) -> dict[Config, MemoryEstimate]:
        known = [(config, trace) for config in configs if (trace := self._peak_of(config))]
        found = {}
        for (config, trace), mean, variance in zip(known, *self._predict(known), strict=True):
            outside_bytes = self._outside_of(config)
            peak = max(outside_bytes + trace.breakdown.parameters_bytes, outside_bytes + mean)
            std_bytes = math.hypot(math.sqrt(max(0.0, variance) + self._line.noise(trace)), self._unsure_of(config))
            log_std = std_bytes / peak
            found[config] = MemoryEstimate(peak_bytes=int(peak), log_std=log_std, breakdown=trace.breakdown)
        return found

    def _seen_of(self, found: PeakBytes) -> list[Seen]:
        traced = ((config, peak_bytes, self._peak_of(config)) for config, peak_bytes in found)
        return [((c, t), float(held - self._outside_of(c)), self._line.noise(t)) for c, held, t in traced if t]

    def _take(self, found: Sequence[Seen]) -> None:
        self._seen = _Rows(self._layout, [known for known, _, _ in found], self._line)
        self._departures = np.array([value for _, value, _ in found]) - self._seen.line
        self._noise = np.array([noise for _, _, noise in found])

    def _learn_scales(self) -> None:
        """From how well the fit does: a library may hold far more for a choice or a group than anything that is traced."""
        if not len(self._noise):
            return
        # a library's buffers for a choice are as large where the model is tiny
        typical_bytes = max(float(self._seen.held.mean()), self._line.fixed_bytes)
        grid = np.array(list(itertools.product(GROUP_STDS, UNTRACED_STDS)))
        of_line, of_groups, of_choices = self._kernels(self._seen, self._seen)
        within, of_choices = of_line + np.diag(self._noise), typical_bytes**2 * of_choices
        self._group_std, share = likely_scales(grid, self._departures, within, of_groups, of_choices)
        self._untraced_std_bytes = share * typical_bytes

    def _predict(self, known: Sequence[tuple[Config, TracedPeak]]) -> tuple[Array, Array]:
        """Mean and variance of the peak less what is outside, one process's noise apart."""
        rows = _Rows(self._layout, known, self._line)
        mean = rows.line
        variance = (
            (rows.features**2).sum(axis=1)
            + (self._group_std * rows.held) ** 2
            + self._untraced_std_bytes**2 * (rows.design.untraced**2).sum(axis=1)
        )
        if len(self._noise):
            root = np.linalg.cholesky(self._kernel(self._seen, self._seen) + np.diag(self._noise))
            across = np.linalg.solve(root, self._kernel(self._seen, rows))
            mean = mean + across.T @ np.linalg.solve(root, self._departures)
            variance = variance - (across**2).sum(axis=0)
        return mean, variance

    def _kernel(self, a: _Rows, b: _Rows) -> Array:
        of_line, of_groups, of_choices = self._kernels(a, b)
        return np.asarray(of_line + self._group_std**2 * of_groups + self._untraced_std_bytes**2 * of_choices)

    def _kernels(self, a: _Rows, b: _Rows) -> tuple[Array, Array, Array]:
        """The same before its scales: the line, what groups of techniques do, and what choices do that no trace shows."""
        of_groups = np.outer(a.held, b.held) * self._layout.likeness(a.design, b.design)
        return a.features @ b.features.T, of_groups, a.design.untraced @ b.design.untraced.T


def _least_bytes(outcome: Outcome) -> int:
    """What a config needs at the least that ran out of memory, or was killed; 0 where that is not known."""
    on_device = outcome.kind is Kind.OOM and not outcome.on_host
    attempted = outcome.peak_bytes + outcome.attempted_bytes if on_device else 0
    return max(attempted, outcome.bound.peak_bytes_low if outcome.bound else 0)


class _Untraced:
    """State and activations learned from probes alone."""

    def __init__(
        self, outside_of: OutsideOf, unsure_of: UnsureOf, layout: Layout, measured: PeakBytes, failed: PeakBytes
    ) -> None:
        self._outside_of, self._unsure_of = outside_of, unsure_of
        seen = [Observation(config=c, value=self._log(c, held)) for c, held in measured]
        if not seen and failed:  # a first idea of how large everything is
            config, least = min(failed, key=lambda pair: pair[1])
            seen = [Observation(config=config, value=self._log(config, least) + BEYOND, noise=BEYOND_STD)]
        self._any = bool(seen)
        self._model = CostModel(layout, RESIDUAL, SCALES, seen)
        for config, least in failed:
            self._model = self._model.with_bound(config, self._log(config, least))

    def estimates(self, configs: Sequence[Config]) -> dict[Config, MemoryEstimate]:
        if not self._any or not configs:
            return {}
        posterior = self._model.posterior(configs)
        found = {}
        for config, mean, variance in zip(configs, posterior.mean, posterior.variance, strict=True):
            trained = math.exp(min(mean, math.log(LARGEST_BYTES)))
            peak = self._outside_of(config) + trained
            std_bytes = math.sqrt(max(0.0, variance) + self._model.noise**2) * trained
            log_std = math.hypot(std_bytes, self._unsure_of(config)) / peak
            found[config] = MemoryEstimate(peak_bytes=int(peak), log_std=log_std)
        return found

    def _log(self, config: Config, peak_bytes: float) -> float:
        return math.log(max(peak_bytes - self._outside_of(config), 0.02 * peak_bytes))
