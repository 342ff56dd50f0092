"""What is better and what may be recommended: a class an objective, found by its name in `OBJECTIVES`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from autotune.records.device import DeviceInfo
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.units import GIB

OOM_INFEASIBILITY = 0.3  # an out-of-memory probe counts as this far above the limit, where its need is not known
FAULT_INFEASIBILITY = 1.0  # crashes, errors, time-outs, non-finite losses
ROOMY = 0.5  # share of the usable memory: a peak below it leaves enough free


@dataclass(frozen=True, kw_only=True)
class Objective(ABC):
    """The figure that a search makes as large or as small as it can. Only a config whose infeasibility is at most zero is recommended.

    Infeasibility is the relative excess over the memory limit less headroom, or a fixed number for a probe that did not run;
    where speed has to be kept, it is also the shortfall in speed.

    A search asks for `score` and `infeasibility` of each trial, for Optuna, and later for `merit` in the play-off. An
    objective defines its figure, and how that depends on speed and memory, the only two that are predicted:

        class Cost(Objective):
            name, unit, better = "cost", "dollars_per_sample", "cheaper"
            help = "cost: fewest dollars for a sample"
            less_is_better = True

            def figure(self, measured: Measurement) -> float:
                return DOLLARS_PER_S / self.speed(measured)

            def worst(self) -> float:
                return -DEAREST

    Attributes:
        name: its name for the user and in reports.
        unit: unit of the figure, in a word.
        better, worse: the adjectives for a config that is better or worse by this objective; a verdict of what is observed says them,
            every other one speaks of speed.
        aim: how a config is to train, in words: `fastest`.
        help: its line in the help of the option.
        less_is_better: whether the figure is to be small.
        speed_weight, memory_weight: log merit is speed_weight * log pace - memory_weight * log memory, plus whatever else
            the figure depends on, which is known only once a config was measured. The pace is the speed, or what is observed.
        kept_speed: share of the baseline's throughput that a config must keep; 0 where any speed will do.
        observed: whether an observer tells the figure, and neither speed nor memory does: then a slow config may be the best, and
            is timed as any other.
        is_thrift: whether its merit is samples per joule, and nothing else.
        is_of_play_off: whether it judges the play-off's processes: one in which the figure was not observed says nothing there.
        train_samples: length of the training in samples. Speed is then that of the whole training, compiling included.
            None where the length is not known: then only the speed of a step counts.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    better: ClassVar[str]
    worse: ClassVar[str] = "slower"
    aim: ClassVar[str] = "best"
    help: ClassVar[str]
    less_is_better: ClassVar[bool] = False
    speed_weight: ClassVar[float] = 1.0
    memory_weight: ClassVar[float] = 0.0
    kept_speed: ClassVar[float] = 0.0
    observed: ClassVar[bool] = False
    is_thrift: ClassVar[bool] = False

    memory_limit_bytes: int
    headroom: float
    baseline_samples_per_s: float | None = None
    train_samples: float | None = None
    is_of_play_off: bool = False

    @abstractmethod
    def figure(self, measured: Measurement) -> float:
        """The figure that is to be large, or small where less is better: positive, in `unit`; infinite where it was not observed."""

    @classmethod
    def why_not_on(cls, device: DeviceInfo) -> str:
        """Why the figure cannot be had on a device, and what would help; empty where it can."""
        return ""

    def worst(self) -> float:
        """The score that the study keeps for an infeasible config, one that does not train or needs more memory than there is.

        No feasible config may score below it, so an objective where less is better has to define its own.
        """
        return 0.0

    @property
    def is_step_speed(self) -> bool:
        """Whether a config's score is the throughput of its steps, and nothing else."""
        return False

    @property
    def is_training_speed(self) -> bool:
        """Whether a config's score is the throughput of the whole training, compiling included, and nothing else."""
        return False

    @classmethod
    def score_name(cls) -> str:
        """The name of the score in Optuna's views."""
        return f"minus_{cls.unit}" if cls.less_is_better else cls.unit

    @property
    def rests_on_speed(self) -> bool:
        """Whether a faster config is a better one: then larger batches help, and whatever disturbs the timing disturbs the figure."""
        return self.speed_weight > 0

    @property
    def usable_bytes(self) -> float:
        """The memory limit less headroom."""
        return self.memory_limit_bytes * (1 - self.headroom)

    @property
    def least_samples_per_s(self) -> float | None:
        """The throughput that a config must keep; None where any will do, or the baseline's is not known."""
        if self.baseline_samples_per_s is None or not self.kept_speed:
            return None
        return self.kept_speed * self.baseline_samples_per_s

    def is_short_of_memory(self, peak_bytes: float) -> bool:
        """Whether a peak leaves so little free that needing less is worth something."""
        return self.memory_weight > 0 or peak_bytes > ROOMY * self.usable_bytes

    def score(self, outcome: Outcome) -> float:
        """The value of an `ok` outcome; larger is better."""
        figure = self.figure(_measurement(outcome))
        if not math.isfinite(figure):
            return self.worst()
        return -figure if self.less_is_better else figure

    def merit(self, outcome: Outcome) -> float:
        """A figure in the same order as `score` but always positive, so that the play-off can compare ratios."""
        figure = self.figure(_measurement(outcome))
        return 1 / figure if self.less_is_better else figure

    def why_unknown(self, measured: Measurement) -> str:
        """Why the figure was not observed in a process, in words."""
        return "it was not observed"

    def pace(self, measured: Measurement) -> float:
        """What the merit rests on beside memory, as the cost model learns it: the speed, or what is observed; larger is better."""
        if not self.observed:
            return self.speed(measured)
        figure = self.figure(measured)
        return 1 / figure if self.less_is_better else figure

    def at_pace(self, measured: Measurement, pace: float) -> Measurement:
        """A measurement of the speed and the memory that are predicted, with the pace that is predicted, where that is not the speed."""
        return measured

    def speed(self, measured: Measurement) -> float:
        """Throughput over the whole training, where its length is known; else the throughput of its steps."""
        return self.whole_samples_per_s(measured.samples_per_s, measured.compile_cold_s)

    def whole_samples_per_s(self, samples_per_s: float, compile_s: float) -> float:
        """Throughput over the whole training, where its length is known: compiling then counts."""
        if self.train_samples is None:
            return samples_per_s
        return self.train_samples / (self.train_samples / samples_per_s + compile_s)

    def is_known(self, outcome: Outcome) -> bool:
        """Whether the figure of what ran was observed; True for what did not run."""
        return outcome.measurement is None or math.isfinite(self.figure(outcome.measurement))

    def infeasibility(self, outcome: Outcome) -> float:
        """At most zero when the outcome may be recommended."""
        measured = outcome.measurement
        if measured is None:
            if outcome.kind is not Kind.OOM:
                return FAULT_INFEASIBILITY
            if not outcome.attempted_bytes:
                return OOM_INFEASIBILITY
            known = (outcome.peak_bytes + outcome.attempted_bytes) / self.usable_bytes - 1
            return max(OOM_INFEASIBILITY, min(known, FAULT_INFEASIBILITY))
        if not self.is_known(outcome) and not self.is_of_play_off:
            return FAULT_INFEASIBILITY
        excess = self._excess(measured)
        if (needed := self.least_samples_per_s) is not None:
            excess = max(excess, 1 - measured.samples_per_s / needed)
        return excess

    def _excess(self, measured: Measurement) -> float:
        excess = measured.long_run_peak_bytes / self.usable_bytes - 1
        if measured.num_alloc_retries or measured.num_ooms:
            excess = max(excess, 0.01)  # the allocator had to flush its cache: one fragment from out of memory
        return excess

    def beyond_memory(self, outcome: Outcome) -> bool:
        """Whether an `ok` outcome needed more than the limit less headroom, or a long training will."""
        return outcome.measurement is not None and self._excess(outcome.measurement) > 0

    def does_not_fit(self, outcome: Outcome) -> bool:
        """Whether the outcome ran out of memory, by no fault of others, or needed more than the limit less headroom."""
        return (outcome.kind is Kind.OOM and not outcome.crowded) or self.beyond_memory(outcome)

    def with_baseline(self, outcome: Outcome) -> Self:
        """The objective once the baseline is measured."""
        return replace(self, baseline_samples_per_s=_measurement(outcome).samples_per_s)

    def in_play_off(self) -> Self:
        """The objective for the play-off's processes, whose speed is compared within pairs and not with the search's baseline."""
        return replace(self, baseline_samples_per_s=None, is_of_play_off=True)

    def feasible(self, outcome: Outcome) -> bool:
        """Whether the outcome may be recommended."""
        return outcome.ok and self.infeasibility(outcome) <= 0


class Throughput(Objective):
    """The fastest training."""

    name, unit, better, help = "throughput", "samples_per_s", "faster", "throughput"
    aim = "fastest"

    def figure(self, measured: Measurement) -> float:
        """Samples per second."""
        return self.speed(measured)

    @property
    def is_step_speed(self) -> bool:
        """True where the length of the training is not known."""
        return self.train_samples is None

    @property
    def is_training_speed(self) -> bool:
        """True where it is known."""
        return self.train_samples is not None


class Memory(Objective):
    """The least memory at about the baseline's speed."""

    name, unit, better = "memory", "peak_GiB", "smaller"
    aim = "in the least memory"
    help = "memory: least memory at the baseline's speed or more"
    less_is_better = True
    speed_weight, memory_weight = 0.0, 1.0
    kept_speed = 0.97

    def figure(self, measured: Measurement) -> float:
        """Peak memory in GiB."""
        return measured.peak_bytes / GIB

    def worst(self) -> float:
        """Twice the limit."""
        return -2 * self.memory_limit_bytes / GIB


class Balanced(Objective):
    """Speed and memory, where memory counts half: half the memory is worth a factor of 1.4 in speed."""

    name, unit, better = "balanced", "samples_per_s_per_root_GiB", "better"
    aim = "fast in little memory"
    help = "balanced: throughput over the square root of memory"
    memory_weight = 0.5

    def figure(self, measured: Measurement) -> float:
        """Samples per second over the square root of the GiB."""
        return float(self.speed(measured) / (measured.peak_bytes / GIB) ** 0.5)


class Energy(Objective):
    """The least energy a sample, of all devices that train together."""

    name, unit, better = "energy", "joules_per_sample", "thriftier"
    worse = "hungrier"
    aim = "with the least energy"
    help = "energy: fewest joules a sample, by the counters of the devices"
    less_is_better = True
    observed = is_thrift = True

    def figure(self, measured: Measurement) -> float:
        """Joules per sample."""
        return math.inf if measured.joules_per_sample is None else measured.joules_per_sample

    @classmethod
    def why_not_on(cls, device: DeviceInfo) -> str:
        """Why no counter can be read there."""
        return device.no_energy

    def why_unknown(self, measured: Measurement) -> str:
        """Why no counter told it."""
        return measured.no_energy

    def at_pace(self, measured: Measurement, pace: float) -> Measurement:
        """With that energy."""
        return replace(measured, joules_per_sample=1 / pace)

    def worst(self) -> float:
        """More than any sample takes."""
        return -1e12


OBJECTIVES: dict[str, type[Objective]] = {each.name: each for each in (Throughput, Memory, Balanced, Energy)}


def _measurement(outcome: Outcome) -> Measurement:
    assert outcome.measurement is not None
    return outcome.measurement
