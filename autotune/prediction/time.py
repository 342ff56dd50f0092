"""How fast a config trains, before it is run: a floor and a slope in the batch size, the optimizer's step and loading apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from autotune.prediction.cost_fit import CostModel, Observation, Posterior, Probes, Scales
from autotune.prediction.cost_terms import CostTerm, Layout, Residual
from autotune.prediction.roofline import Roofline
from autotune.records.config import BATCH_KEYS, Config
from autotune.records.device import BF16, FP16, FP32, TF32
from autotune.records.measured import NORMAL_95
from autotune.records.outcome import Measurement
from autotune.space import Space
from autotune.task.unequal_samples import LengthDistribution
from autotune.techniques import Factor

# Seconds per sample at a micro batch b, s samples per optimizer step and w elements a sample, padding included:
# compute * w + launch / b + update / s + data.
LAUNCH = Factor(typical=0.03, spread=4.0)
TERMS = (
    CostTerm(name="compute", scale=lambda b, s, w: w, share=Factor(spread=1e3)),
    CostTerm(name="launch", scale=lambda b, s, w: 1 / b, share=LAUNCH),
    CostTerm(name="update", scale=lambda b, s, w: 1 / s, share=Factor(typical=0.03, spread=3.0)),
    CostTerm(name="data", scale=lambda b, s, w: np.ones_like(b), share=Factor(typical=0.02, spread=4.0)),
)
COUNTED_SPREAD = 2.5  # of an update whose operators and bytes were counted; seen: a factor of 0.4 to 3
# of what a type does, by rates and work; seen: 1.3, and 1.8 where kernels are made for each new shape
TYPE_SPREAD = 1.4
RESIDUAL = Residual(trend=0.05, bend=0.03, group=0.03, own=0.01)
SCALES = Scales(noise=((0.005, 0.1), (0.01, 0.2), (0.02, 0.3), (0.04, 0.25), (0.08, 0.1), (0.16, 0.05)))
PHASES = {"data": "data", "update": "optimizer"}  # term -> phase of a measurement that shows it alone
MIN_PHASE_S = 1e-6  # what a clock can tell
UNKNOWN_NOISE = 1.0  # of a probe whose interval is no interval
MAX_LOG = 700.0  # of a float
DISTURBED_NOISE = 0.1  # of a probe that others disturbed
HURRIED_NOISE = 0.05  # of a probe that was cut short: its warm-up was all that was timed


@dataclass(frozen=True, kw_only=True)
class SpeedEstimate:
    """Throughput of a config, as far as it is known.

    Attributes:
        samples_per_s: median; `low` and `high` bound 95 %.
        log_std: standard deviation of its logarithm.
    """

    samples_per_s: float
    log_std: float

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return self.samples_per_s * _exp(-NORMAL_95 * self.log_std)

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""
        return self.samples_per_s * _exp(NORMAL_95 * self.log_std)


class TimeModel:
    """Throughput of any config of a space, from priors and the probes so far; those that were ended are bounds.

    Args:
        lengths: of the training set's samples: larger micro batches are padded more.
        roofline: the device's rates and the model's work, from which priors come where they are known.
    """

    def __init__(
        self,
        space: Space,
        probes: Probes = (),
        lengths: LengthDistribution | None = None,
        roofline: Roofline | None = None,
    ) -> None:
        self._baseline = space.baseline
        terms, compute = _counted(roofline, space.baseline) if roofline else (TERMS, {})
        width = lengths.mean_width if lengths else lambda batch_size: 1.0
        layout = Layout(terms, space, width, compute)
        measured = [(config, o.measurement) for config, o in probes if o.measurement is not None]
        seen = [_observation(config, found) for config, found in measured if 0 < found.samples_per_s < math.inf]
        self._seen = [observation.config for observation in seen]
        self._model = CostModel(layout, RESIDUAL, SCALES, seen)
        for config, outcome in probes if seen else ():
            if outcome.measurement is None and outcome.samples_per_s_high:
                self._model = self._model.with_bound(config, -math.log(outcome.samples_per_s_high))

    def leave_one_out(self) -> list[TimeModel]:
        """The models that would be without one probe that is the only one to show a technique's choice.

        A process that something disturbed unseen may be far off, and nothing else would tell of it.
        """
        found = []
        for row, config in enumerate(self._seen):
            others = self._seen[:row] + self._seen[row + 1 :]
            switched = {name: c for name, c in config.differences(self._baseline).items() if name not in BATCH_KEYS}
            if any(all(other[name] != choice for other in others) for name, choice in switched.items()):
                new = copy(self)
                new._seen, new._model = others, self._model.without(row)
                found.append(new)
        return found

    @property
    def noise(self) -> float:
        """Standard deviation of the log throughput between one process and another, as far as it is known."""
        return self._model.noise

    def reach(self, config: Config, name: str) -> float:
        """Share of a config's time on which a technique acts at all: it can gain no more than that."""
        return self._model.reach(config, name)

    def speeds(self, configs: Sequence[Config]) -> Posterior:
        """The log throughputs of several configs together: what two have in common does not tell them apart."""
        found = self._model.posterior(configs)  # of the log seconds per sample
        return replace(found, mean=-found.mean)

    def estimate(self, configs: Sequence[Config]) -> list[SpeedEstimate]:
        """Each config by itself. Before any probe only ratios between configs mean something."""
        speeds = self.speeds(configs)
        return [
            SpeedEstimate(samples_per_s=_exp(mean), log_std=math.sqrt(max(0.0, variance)))
            for mean, variance in zip(speeds.mean, speeds.variance, strict=True)
        ]


def _counted(roofline: Roofline, baseline: Config) -> tuple[tuple[CostTerm, ...], Mapping[str, Factor]]:
    """The terms with shares by the rates of the device and the work of the model, and what each type does to `compute`."""
    size, compute_s = baseline.batch_size, roofline.compute_s(baseline.batch_size, FP32)
    if not compute_s:
        return TERMS, {}
    shares = {
        # beside launching, small batches make operators slower: the share that is expected where nothing is known
        "launch": Factor(typical=LAUNCH.typical + roofline.launch_s() / size / compute_s, spread=LAUNCH.spread),
        "update": Factor(typical=roofline.update_s() / baseline.samples_per_step / compute_s, spread=COUNTED_SPREAD),
    }
    factors = {name: roofline.factor(size, name) for name in (TF32, BF16, FP16)}
    compute = {name: Factor(typical=factor, spread=TYPE_SPREAD) for name, factor in factors.items() if factor}
    return tuple(replace(term, share=shares.get(term.name, term.share)) for term in TERMS), compute


def _exp(log: float) -> float:
    return math.exp(min(max(log, -MAX_LOG), MAX_LOG))


def _observation(config: Config, measured: Measurement) -> Observation:
    low, high = measured.samples_per_s_low, measured.samples_per_s_high
    within = math.log(high / low) / 2 / NORMAL_95 if 0 < low <= high < math.inf else UNKNOWN_NOISE
    extra = DISTURBED_NOISE * bool(measured.disturbances) + HURRIED_NOISE * measured.cut_short
    noise = math.hypot(within, extra)
    # term / (samples / samples per step) is its size at the baseline's samples per step
    terms = {
        term: math.log(max(MIN_PHASE_S, measured.phases_s[phase]) / config.samples_per_step)
        for term, phase in PHASES.items()
        if phase in measured.phases_s
    }
    return Observation(config=config, value=-math.log(measured.samples_per_s), noise=noise, terms=terms)
