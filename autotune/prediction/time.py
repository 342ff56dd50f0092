"""How fast a config trains, before it is run: a floor and a slope in the batch size, the optimizer's step and loading apart.

Where a device's rates were measured, they say of a model's own work how long a step takes, and how near a measured one comes. Each
operator is limited by arithmetic or by memory (Williams, Waterman and Patterson, Roofline, CACM 2009): matrix products and
convolutions are taken to run at their measured rate, all other operators at the bandwidth of memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from autotune.prediction.cost import CostModel, CostTerm, Layout, Observation, Posterior, Probes, Residual, Scales
from autotune.prediction.pooling import Learned, Parameter, Said
from autotune.prediction.traces import Traces, UpdateTrace, WorkTrace
from autotune.records.config import BATCH_KEYS, Config
from autotune.records.device import BF16, FP16, FP32, MATMUL, TF32, Calibration
from autotune.records.measured import NORMAL_95
from autotune.records.outcome import Measurement
from autotune.records.result import DeviceUse
from autotune.space import Space
from autotune.task.unequal_samples import LengthDistribution
from autotune.techniques import Factor, Techniques

SHORT_TYPES = (BF16, FP16)
SHORTENED = 0.75  # of the bytes of other operators, where autocast makes about half of their tensors short
# share of a step's computing that no measured rate explains and no type changes: the mean of the three studies on a CPU (0, 0.6, 0.65)
UNACCOUNTED = 0.4
HOST_PER_LAUNCH = 3.0  # what Python and autograd add to launching an operator, in units of it
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
        said: what earlier studies say of parameters, and `chance_to_hold`, that it holds here before any probe. The model believes it
            as long as the probes make it likelier than not: a robust mixture of priors, of which the likelier part is taken
            (Schmidli et al., Robust meta-analytic-predictive priors in clinical trials, Biometrics 2014).
    """

    def __init__(
        self,
        space: Space,
        probes: Probes = (),
        lengths: LengthDistribution | None = None,
        roofline: Roofline | None = None,
        said: Mapping[Parameter, Sequence[Said]] = MappingProxyType({}),
        chance_to_hold: float = 1.0,
    ) -> None:
        self._baseline = space.baseline
        terms, compute = _counted(roofline, space.baseline) if roofline else (TERMS, {})
        width = lengths.mean_width if lengths else lambda batch_size: 1.0
        measured = [(config, o.measurement) for config, o in probes if o.measurement is not None]
        seen = [_observation(config, found) for config, found in measured if 0 < found.samples_per_s < math.inf]
        self._seen = [observation.config for observation in seen]
        probed = [config for config, _ in probes]
        self._model = CostModel(Layout(terms, space, width, compute, probed=probed), RESIDUAL, SCALES, seen)
        self.holds = False
        if said and seen:
            taught = CostModel(Layout(terms, space, width, compute, said, probed), RESIDUAL, SCALES, seen)
            plain = self._model
            odds = (
                taught.log_evidence(plain) - plain.log_evidence(plain) + math.log(chance_to_hold / (1 - chance_to_hold))
            )
            if odds > 0:
                self._model, self.holds = taught, True
        for config, outcome in probes if seen else ():
            if outcome.measurement is None and outcome.samples_per_s_high:
                self._model = self._model.with_bound(config, -math.log(outcome.samples_per_s_high))

    def learned(self) -> dict[Parameter, Learned]:
        """What the probes alone say of each parameter."""
        return self._model.learned()

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
    # term / (samples / samples per step) is its size at the baseline's samples per step; both are of all processes, as the speed is
    samples_per_step = measured.step_s * measured.samples_per_s
    terms = {
        term: math.log(max(MIN_PHASE_S, measured.phases_s[phase]) / samples_per_step)
        for term, phase in PHASES.items()
        if phase in measured.phases_s
    }
    return Observation(config=config, value=-math.log(measured.samples_per_s), noise=noise, terms=terms)


@dataclass(frozen=True)
class Roofline:
    """A model's work by the rates of a device. All figures are of plain training, recomputation apart.

    Attributes:
        work, update: of a micro batch and of an optimizer's step, with nothing switched on.
    """

    calibration: Calibration
    work: WorkTrace
    update: UpdateTrace
    traces: Traces

    @staticmethod
    def of(calibration: Calibration, traces: Traces | None) -> Roofline | None:
        """None where the device was not measured, or the model's work is not known."""
        if traces is None or not calibration.bytes_per_s:
            return None
        model, update = traces.models.get(()), traces.updates.get(())
        if model is None or model.work is None or update is None:
            return None
        if any(calibration.best(kind, FP32) is None for kind, *_ in model.work.flops):
            return None
        return Roofline(calibration, model.work, update, traces)

    def flops(self, batch_size: int) -> float:
        """FLOPs of matrix products and convolutions per sample, forward and backward."""
        return self._width(batch_size) * sum(constant / batch_size + slope for _, _, constant, slope in self.work.flops)

    def compute_s(self, batch_size: int, arithmetic: str) -> float | None:
        """Seconds per sample with matrix products and convolutions in a type; None where its rate is not known."""
        arithmetic_s = self._arithmetic_s(batch_size, arithmetic)
        if arithmetic_s is None:
            return None
        plain_bytes = self.work.plain_bytes[0] / batch_size + self.work.plain_bytes[1]
        shortened = SHORTENED if arithmetic in SHORT_TYPES else 1.0
        moving_s = shortened * plain_bytes / (self.calibration.bytes_per_s or 0.0)
        return arithmetic_s + self._width(batch_size) * moving_s

    def _arithmetic_s(self, batch_size: int, arithmetic: str) -> float | None:
        seconds = 0.0
        for kind, _, constant, slope in self.work.flops:
            rate = self.calibration.best(kind, arithmetic) or (kind != MATMUL and self.calibration.best(kind, FP32))
            if not rate:
                return None
            seconds += (constant / batch_size + slope) / rate
        return self._width(batch_size) * seconds

    def factor(self, batch_size: int, arithmetic: str) -> float | None:
        """What a type multiplies the time of forward and backward by; None where its rates are not known."""
        plain_s, other_s = self.compute_s(batch_size, FP32), self.compute_s(batch_size, arithmetic)
        return UNACCOUNTED + (1 - UNACCOUNTED) * other_s / plain_s if plain_s and other_s else None

    def use(self, config: Config, samples_per_s: float, techniques: Techniques) -> DeviceUse | None:
        """How far from the device's limits a config runs at a speed; None where the rates of its type are not known."""
        size, arithmetic = config.batch_size, techniques.arithmetic_of(config)
        fastest_s = self._arithmetic_s(size, arithmetic)
        if not fastest_s or not self.calibration.bytes_per_s:
            return None
        own = self.traces.models.get(techniques.micro_batch_group(config))
        constant, slope = (own.work if own is not None and own.work is not None else self.work).moved_bytes
        bytes_per_s = self._width(size) * (constant / size + slope) * samples_per_s
        return DeviceUse(
            arithmetic=arithmetic,
            flops_per_s=self.flops(size) * samples_per_s,
            flops_share=fastest_s * samples_per_s,
            bytes_per_s=bytes_per_s,
            bandwidth_share=bytes_per_s / self.calibration.bytes_per_s,
            contention=self.calibration.contention,
        )

    def launch_s(self) -> float:
        """Seconds per micro step that do not depend on its size."""
        return self.work.num_operators * HOST_PER_LAUNCH * (self.calibration.launch_s or 0.0)

    def update_s(self) -> float:
        """Seconds per optimizer step."""
        launching_s = self.update.num_operators * HOST_PER_LAUNCH * (self.calibration.launch_s or 0.0)
        return self.update.moved_bytes / (self.calibration.bytes_per_s or 0.0) + launching_s

    def _width(self, batch_size: int) -> float:
        """How wide a sample is over one as wide as was traced."""
        lengths = self.traces.lengths
        return 1.0 if lengths is None else lengths.mean_width(batch_size) / lengths.quantiles[-1]
