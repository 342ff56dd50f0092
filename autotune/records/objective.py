"""What makes one outcome better than another, and what a sampler is told of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.units import GIB

OOM_INFEASIBILITY = 0.3  # as far above the limit as an out-of-memory probe is taken to be, when it cannot be told
FAULT_INFEASIBILITY = 1.0  # crashes, errors, time-outs, non-finite losses
# What scores are, by objective, as Optuna's views name them.
SCORES = {"throughput": "samples_per_s", "memory": "minus_peak_GiB", "balanced": "samples_per_s_per_root_GiB"}
ROOMY = 0.5  # of the usable memory: with this much free, memory is not short
MEMORY_SPEED_TOLERANCE = 0.97  # share of the baseline's throughput that the objective `memory` must keep


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One objective under one constraint: infeasibility, which is at most zero for what may be recommended.

    Scores are maximised. The constraint is the relative excess over the memory limit less headroom, or a fixed figure for
    what did not run; with the objective `memory` it is also the shortfall in speed.

    Attributes:
        train_samples: how many the training is to take; its speed is then that of the whole training, compiling included.
            None where that is not known: then the speed of a step is all that counts.
    """

    name: str
    memory_limit_bytes: int
    headroom: float
    baseline_samples_per_s: float | None = None
    train_samples: float | None = None

    @property
    def usable_bytes(self) -> float:
        """The memory limit less headroom."""
        return self.memory_limit_bytes * (1 - self.headroom)

    def is_short_of_memory(self, peak_bytes: float) -> bool:
        """Whether a peak leaves so little free that needing less is worth something."""
        return self.name != "throughput" or peak_bytes > ROOMY * self.usable_bytes

    def score(self, outcome: Outcome) -> float:
        """The value of an `ok` outcome; larger is better."""
        measured = outcome.measurement
        assert measured is not None
        if self.name == "memory":
            return -measured.peak_bytes / GIB
        speed = self.whole_samples_per_s(measured.samples_per_s, measured.compile_cold_s)
        return float(speed / (measured.peak_bytes / GIB) ** 0.5) if self.name == "balanced" else speed

    def whole_samples_per_s(self, samples_per_s: float, compile_s: float) -> float:
        """Throughput over the whole training, where its length is known: compiling then counts."""
        if self.train_samples is None:
            return samples_per_s
        return self.train_samples / (self.train_samples / samples_per_s + compile_s)

    @property
    def is_step_speed(self) -> bool:
        """Whether a config's score is the throughput of its steps, and nothing else."""
        return self.name == "throughput" and self.train_samples is None

    def merit(self, outcome: Outcome) -> float:
        """The same order as `score`, always positive: what the play-off compares by ratios."""
        score = self.score(outcome)
        return -1 / score if self.name == "memory" else score

    def infeasibility(self, outcome: Outcome) -> float:
        """At most zero when the outcome may be recommended."""
        measured = outcome.measurement
        if measured is None:
            if outcome.kind is not Kind.OOM:
                return FAULT_INFEASIBILITY
            known = (outcome.peak_bytes + outcome.attempted_bytes) / self.usable_bytes - 1
            return (
                max(OOM_INFEASIBILITY, min(known, FAULT_INFEASIBILITY))
                if outcome.attempted_bytes
                else OOM_INFEASIBILITY
            )
        excess = self._excess(measured)
        if self.name == "memory" and self.baseline_samples_per_s is not None:
            needed = MEMORY_SPEED_TOLERANCE * self.baseline_samples_per_s
            excess = max(excess, 1 - measured.samples_per_s / needed)
        return excess

    def _excess(self, measured: Measurement) -> float:
        excess = measured.peak_bytes / self.usable_bytes - 1
        if measured.num_alloc_retries or measured.num_ooms:
            excess = max(excess, 0.01)  # the allocator had to flush its cache: one fragment from out of memory
        return excess

    def beyond_memory(self, outcome: Outcome) -> bool:
        """Whether an `ok` outcome needed more than the limit less headroom."""
        return outcome.measurement is not None and self._excess(outcome.measurement) > 0

    def does_not_fit(self, outcome: Outcome) -> bool:
        """Whether the outcome ran out of memory, by no fault of others, or needed more than the limit less headroom."""
        return (outcome.kind is Kind.OOM and not outcome.crowded) or self.beyond_memory(outcome)

    def with_baseline(self, outcome: Outcome) -> Objective:
        """The objective once the baseline is measured."""
        assert outcome.measurement is not None
        return replace(self, baseline_samples_per_s=outcome.measurement.samples_per_s)

    def in_play_off(self) -> Objective:
        """The objective for single play-off processes: there speed is compared in pairs, not with the search's baseline."""
        return replace(self, baseline_samples_per_s=None)

    def feasible(self, outcome: Outcome) -> bool:
        """Whether the outcome may be recommended."""
        return outcome.ok and self.infeasibility(outcome) <= 0

    def worst(self) -> float:
        """What the study is told of a config that is not feasible: it trains not at all, or needs more than there is."""
        return -2 * self.memory_limit_bytes / GIB if self.name == "memory" else 0.0
