"""When to give up on a running probe: once it can become neither the answer nor a point of the front. Its outcome is a bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.records.config import Config
from autotune.records.inspection import Inspection
from autotune.records.measured import pareto_front
from autotune.records.outcome import COMPILING, Bound, Outcome, Progress
from autotune.records.study import BASELINE, PLAY_OFF, Proposal
from autotune.study.history import History
from autotune.tuning.budget import Budget
from autotune.units import format_seconds, plural

FIRST_STEP_S = 2.0  # what a first step may take beyond the others, at the least
PATIENCE = 2.0  # times what the best config takes for as many samples
LENIENCE = 6.0  # the same for what may enter the front, for the baseline, and for a config that has run before
COMPILING_PATIENCE = 3.0  # the same for what is compiled before the first step, compared with what is expected
LOST_SHARE = 0.1  # of the budget: what time-outs may take in one search, as far as the steps are short enough
FEWEST_LOST_S = 2.0  # that a probe is waited for when they have

Front = tuple[tuple[float, float], ...]  # peak bytes and samples/s


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long one probe may take for what it has done.

    Attributes:
        batch_size: samples of a micro step; `num_first` micro steps are the first that it reports.
        step_s: seconds of a micro step and an update of what it is compared with; infinite where nothing is known.
        factor: so many times that is waited.
        begin_s: for set-up and for what only a first step does (compiling, say).
        warmup_s: for what other probes needed before they could be timed; granted once a micro step is done.
        most_s: for the first steps, or one later; at least so long that what is ended is shown to be slower.
        front: of what was measured.
    """

    batch_size: int
    num_first: int
    step_s: float
    factor: float
    begin_s: float
    warmup_s: float
    most_s: float
    front: Front

    def allowed_s(self, progress: Progress) -> float:
        """Seconds from its start after which a probe that has come this far is ended."""
        if not (done := progress.num_micro_steps):
            return self.begin_s + min(self.most_s, self.factor * self.num_first * self.step_s)
        factor = LENIENCE if self._may_enter_the_front(progress) else self.factor
        return self._begun_s(progress) + factor * done * self.step_s + min(self.most_s, factor * self.step_s)

    def bound(self, progress: Progress, elapsed_s: float) -> Bound | None:
        """What is known of a config whose probe ends here: the micro step that is not done has taken all of its time.

        None where it was still compiled.
        """
        if progress.stage == COMPILING:
            return None
        num_micro = progress.num_micro_steps + (1 if progress.num_micro_steps else self.num_first)
        slow_s = elapsed_s - self._begun_s(progress)
        high = progress.samples_per_s_high or (num_micro * self.batch_size / slow_s if slow_s > 0 else None)
        return Bound(samples_per_s_high=high, peak_bytes_low=progress.peak_bytes)

    def why(self, progress: Progress, elapsed_s: float) -> str:
        """Why the probe ends, in words."""
        done = (
            f"after {plural(progress.num_micro_steps, 'micro step')}" if progress.num_micro_steps else "without a step"
        )
        if progress.stage == COMPILING:
            return f"ended while it was compiled, after {format_seconds(elapsed_s)}"
        known = f", where the best takes {format_seconds(self.num_first * self.step_s)} a step"
        return f"ended {done} in {format_seconds(elapsed_s)}{known if self.step_s < math.inf else ''}"

    def _begun_s(self, progress: Progress) -> float:
        return self.begin_s + (self.warmup_s if progress.num_micro_steps else 0.0)

    def _may_enter_the_front(self, progress: Progress) -> bool:
        high = progress.samples_per_s_high
        return high is None or not any(peak <= progress.peak_bytes and speed >= high for peak, speed in self.front)


def patience_for(
    proposal: Proposal, history: History, budget: Budget, inspection: Inspection, slowest_start: float = 1.0
) -> Patience:
    """How long a proposal's probe may take. `slowest_start` is as of `Runner`.

    What is searched is compared with the best so far. The play-off's configs are compared with what they did before, and
    the baseline, like everything as long as nothing has run, with the inspection's step of a few samples, which was cold.
    """
    config = proposal.config
    setup_s = history.setup_s(config)
    ran = [  # what takes longer to prepare (to compile, say) tells nothing of this one's first step
        (known, outcome.measurement, outcome)
        for known, outcome in history.known.items()
        if outcome.measurement and history.setup_s(known) <= setup_s
    ]
    best = history.best[1] if history.best is not None else None
    compared = history.known.get(config) if proposal.stage == PLAY_OFF else best
    if proposal.stage == BASELINE or compared is None or compared.measurement is None:
        step_s, factor = config.batch_size * (inspection.sample_s or math.inf), LENIENCE
    else:
        found = compared.measurement
        step_s = config.batch_size / found.samples_per_s + found.phases_s.get("optimizer", 0.0)
        factor = LENIENCE if proposal.stage == PLAY_OFF else PATIENCE
    larger = [max(1.0, config.batch_size / known.batch_size) for known, _, _ in ran]  # more samples are made, too
    set_up_s = max(
        (grown * (o.running_s - o.spent_training_s) for grown, (_, _, o) in zip(larger, ran, strict=True)),
        default=budget.spent_s.get("inspection", 0.0),
    )
    first_s = max([FIRST_STEP_S, inspection.step_s or 0.0, *(found.compile_s for _, found, _ in ran)])
    num_first = min(2, config.accumulation_steps)
    most_s = max(FEWEST_LOST_S, LOST_SHARE * budget.budget_s - budget.lost_s)
    if proposal.stage in (BASELINE, PLAY_OFF):
        most_s = math.inf
    elif step_s < math.inf:
        most_s = max(most_s, PATIENCE * num_first * step_s)
    return Patience(
        batch_size=config.batch_size,
        num_first=num_first,
        step_s=step_s,
        factor=factor,
        begin_s=slowest_start * set_up_s + first_s + COMPILING_PATIENCE * setup_s,
        warmup_s=max((grown * found.warmup_s for grown, (_, found, _) in zip(larger, ran, strict=True)), default=0.0),
        most_s=most_s,
        front=rates_on_front(history.feasible),
    )


def rates_on_front(feasible: dict[Config, Outcome]) -> Front:
    """Peak and throughput of each measured config that no other beats in both."""
    points = [
        (float(o.measurement.peak_bytes), o.measurement.samples_per_s) for o in feasible.values() if o.measurement
    ]
    return tuple(points[index] for index in pareto_front(points))
