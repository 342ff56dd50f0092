"""How long a search and its probes may take, on the runner's clock.

A running probe is given up once it can become neither the answer nor a point of the Pareto front of memory and speed. Its
outcome is then a bound.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from autotune.probe.timing import MIN_WARMUP_STEPS, OVERTIME
from autotune.records.config import Config, ProbeSettings, World
from autotune.records.inspection import Inspection
from autotune.records.measured import pareto_front
from autotune.records.outcome import COMPILING, Bound, Kind, Outcome, Progress
from autotune.records.study import BASELINE, PLAY_OFF, Proposal
from autotune.study.history import History
from autotune.tuning.playoff import MIN_ROUNDS, SHORTEST_TIMED_S
from autotune.units import format_seconds, plural

MIN_TIMEOUT_S = 20.0
CHECK_SHARE = 0.1  # of the budget: kept for the answer's check before any check was made
OVERRUN = 1.05  # times the budget: the most that a search may take
TIMEOUT_FACTOR = 6.0  # of the baseline's wall time
FIRST_TIMEOUT_SHARE = 0.4  # of the budget: for a probe before anything is known
UNKNOWN_TIME_SHARE = 0.15  # of the budget: for a probe as long as nothing has run
SLOWEST_TIMED = 0.5  # of the baseline's throughput: what is slower than that is not worth timing
GUEST_SHARE = 0.15  # of the time that exploring and play-off share: kept at most for one device beside the play-off
UNDO_SHARE = 0.15  # of the time that exploring and play-off share: kept at most for undoing changes of the best config
SETUP_SHARE = 0.1  # of the budget: what one config may be expected to take before its first step
MOST_GAIN = 0.25  # of a training's time: the most that a choice that compiles is assumed to save
END_SHARE = 0.03  # of the budget: after the last probe the answer is put together and written
USUAL_AUTO_S = 120.0  # most searches that end by themselves take about so long
AHEAD_S = 3600.0  # of training, where the user does not say how long it will be
RECENT = 8  # probes that tell how long the next one takes

MOST_FINALISTS = 3
WANTED_ROUNDS = 5  # processes differ more than blocks within one, so many short rounds beat a few long ones
FEWEST_ROUNDS = 2  # without a second round there is no interval between processes
LEAST_ROUND = 3  # processes of a round: the baseline, the best so far and a newcomer
MARGIN = 1.1  # times what a process of the play-off is reckoned to take: it is cold, and processes differ
MAX_SHARE = 0.4  # of the time that exploring and play-off share: kept at most for the rounds of the play-off

FIRST_STEP_S = 2.0  # a first step may take longer than others by this much, or more
PATIENCE = 2.0  # times as long as the best config takes for as many samples
LENIENCE = 6.0  # the same for what may enter the front, for the baseline, and for a config that has run before
COMPILING_PATIENCE = 3.0  # times the seconds that compiling before the first step is expected to take
LOST_SHARE = 0.1  # of the budget: for time-outs; every probe gets time for its first steps, so long steps exceed it
FEWEST_LOST_S = 2.0  # a probe's steps still get this long when time-outs have used up that share

Front = tuple[tuple[float, float], ...]  # peak bytes and samples/s


@dataclass
class Budget:
    """The time of one search.

    Attributes:
        budget_s: time for everything from start to answer; the most that it may take where `is_auto`.
        probe_timeout_s: the time-out that the user set for a probe; None lets the search derive one.
        now_s: reads the runner's clock; in a replay it shows the recorded seconds.
        started_s: when the user began to wait, on that clock.
        num_trials: largest number of probes outside the play-off; None for no limit.
        begins: called with the purpose's name when `split` begins to count the time of one.
        spent_s: seconds by purpose (`split` adds to it).
        lost_s: seconds of probes that ended as a time-out, ended early or killed.
        first_probe_s: seconds from the start to the first probe; None before it.
        shared_from_s: when exploring and the play-off began to share the rest of the time, in seconds from the start.
        keeps_checks: whether time is kept for comparing the finalists with plain fp32.
        kept_probes: number of probes for which time is kept, to undo single changes of the best config.
        check_s: how long the longest comparison with plain fp32 has taken; the next is taken to need as long.
        is_settled: whether a play-off has told all that it can of what was probed before it.
        keeps_rounds: whether time is kept for a play-off and the checks before it.
        is_auto: whether the search ends where going on is expected to gain less than the time that it takes.
        guest_s: time kept for measuring one device beside the play-off, within a share.
        evaluation_s: time for finding the batch size for evaluation, which follows the answer; `budget_s` is without it.
    """

    budget_s: float
    probe_timeout_s: float | None
    now_s: Callable[[], float]
    started_s: float
    num_trials: int | None = None
    begins: Callable[[str], None] = lambda name: None
    spent_s: dict[str, float] = field(default_factory=dict)
    lost_s: float = 0.0
    first_probe_s: float | None = None
    shared_from_s: float = 0.0
    keeps_checks: bool = True
    kept_probes: int = 0
    check_s: float = 0.0
    is_settled: bool = False
    keeps_rounds: bool = True
    is_auto: bool = False
    guest_s: float = 0.0
    evaluation_s: float = 0.0

    def keep_for_evaluation(self, share: float) -> None:
        """Keep a share of the time that is left."""
        self.evaluation_s = share * max(0.0, self.budget_s - self.elapsed_s)
        self.budget_s -= self.evaluation_s

    @contextlib.contextmanager
    def without_rounds(self) -> Iterator[None]:
        """Keep no time for a play-off inside the block, as where nothing but the baseline could be the answer."""
        self.keeps_rounds = False
        try:
            yield
        finally:
            self.keeps_rounds = True

    def end(self) -> None:
        """Leave no time for anything more."""
        self.budget_s, self.evaluation_s = self.elapsed_s / OVERRUN, 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the user began to wait."""
        return self.now_s() - self.started_s

    @property
    def latest_s(self) -> float:
        """Seconds after the start at which the search should have ended at the latest."""
        return OVERRUN * self.budget_s

    def left_s(self, *, has_answer: bool) -> float:
        """Seconds until a running probe is cut short. As long as nothing is feasible, it may exceed the budget by one time-out."""
        if not has_answer:
            return self.budget_s + self.first_timeout_s - self.elapsed_s
        return self.latest_s - max(self._kept_for_checks_s, END_SHARE * self.budget_s) - self.elapsed_s

    @property
    def free_s(self) -> float:
        """Seconds for more probes, until the answer must be checked."""
        return self.budget_s - self._kept_for_checks_s - self.elapsed_s

    @property
    def _kept_for_checks_s(self) -> float:
        """Seconds kept for comparing: as long as the longest took; before the first, as long as the inspection, within a share."""
        if not (self.keeps_checks and self.keeps_rounds):
            return 0.0
        return self.check_s or min(self.spent_s.get("inspection", 0.0), CHECK_SHARE * self.budget_s)

    def _unknown_checks_s(self, probe_s: float) -> float:
        """Seconds that comparing may take beyond those kept for it, as long as it is not known how long it takes.

        Args:
            probe_s: of a probe; the exact changes and all of them may each take as long.
        """
        if self.check_s or not self.keeps_checks:
            return 0.0
        return max(0.0, min(2 * probe_s, CHECK_SHARE * self.budget_s) - self._kept_for_checks_s)

    @property
    def first_timeout_s(self) -> float:
        """The time-out of a probe before anything is known."""
        return self.probe_timeout_s or max(MIN_TIMEOUT_S, FIRST_TIMEOUT_SHARE * self.budget_s)

    def timeout_s(self, ran: Outcome | None) -> float:
        """The time-out of a probe, given the outcome of the baseline or of something else that ran."""
        if self.probe_timeout_s is not None:
            return self.probe_timeout_s
        return self.first_timeout_s if ran is None else max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * ran.wall_s)

    def first_settings(
        self, memory_limit_bytes: int, world: World, seed: int, *, min_timed_s: float = 0.0
    ) -> ProbeSettings:
        """The settings of every probe, before anything is known.

        Args:
            min_timed_s: so long a config has to be timed at least, for what is observed meanwhile.
        """
        share_s = min(self.budget_s, USUAL_AUTO_S if self.is_auto else math.inf) / 60
        return ProbeSettings(
            memory_limit_bytes=memory_limit_bytes,
            world=world,
            seed=seed,
            timeout_s=self.first_timeout_s,
            min_timed_s=min_timed_s,
            max_timed_s=max(min_timed_s, min(10.0, max(SHORTEST_TIMED_S, share_s))),
            max_warmup_s=min(20.0, max(2.0, share_s)),
        )

    def paced(self, settings: ProbeSettings, history: History) -> ProbeSettings:
        """The settings of the next probe: its time-out, the speed below which it is not worth timing, and what is known of shapes."""
        settings = settings.replace(shapes_recur=history.shapes_recur)
        baseline = history.baseline
        if baseline is not None and baseline.measurement is not None:
            slowest = SLOWEST_TIMED * baseline.measurement.samples_per_s * (not history.objective.observed)
            return settings.replace(slowest_samples_per_s=slowest, timeout_s=self.timeout_s(baseline))
        ran = next((trial.outcome for trial in reversed(history.searched) if trial.outcome.ok), None)
        timeout_s = self.timeout_s(ran)
        if baseline is not None and ran is None and self.probe_timeout_s is None:
            timeout_s = min(timeout_s, max(MIN_TIMEOUT_S, UNKNOWN_TIME_SHARE * self.budget_s))
        return settings.replace(timeout_s=timeout_s)

    def allows_a_probe(self, history: History) -> bool:
        """Whether there is time for another probe before the play-off."""
        return self.has_trials_left(history) and self.setup_left_s(history) > 0

    def has_trials_left(self, history: History) -> bool:
        """Whether the user's number of trials leaves another one before the play-off."""
        num_begun = len(history.searched) - history.num_resumed + len(history.running)
        return self.num_trials is None or num_begun < self.num_trials

    def setup_left_s(self, history: History) -> float:
        """Seconds that another probe before the play-off may take for what only some configs need, such as compiling.

        As long as nothing but the baseline could be the answer, or inside `without_rounds`, nothing is kept for a play-off, except for
        one device beside it, and another probe is taken to need no longer than the shortest of the latest. Otherwise time is kept for
        the wanted rounds, up to a share, and at least for one round with a config found last: one that has no time left to play was
        found in vain. Once a play-off is settled, that one round is enough. Where no baseline runs, there is no gain to be told, and as
        many rounds of the best alone are wanted as a play-off has at least. Where processes take long, time is kept for as many rounds
        of the best so far as a verdict takes, and another probe is taken to need no less time than the best did.
        """
        expected_s = self.expected_probe_s(history)
        shared_s = self.budget_s - self.shared_from_s
        guest_s = min(self.guest_s, GUEST_SHARE * shared_s)
        has_baseline = history.space.baseline in history.feasible
        if not history.feasible:
            expected_s, leave_s = min(self._latest_s(history)), 0.0
        elif has_baseline and (len(history.feasible) == 1 or not self.keeps_rounds):
            expected_s, leave_s = min(self._latest_s(history)), guest_s
        else:
            best_s, round_s = self._lead_s(history) or (0.0, 0.0)
            expected_s = max(expected_s, best_s)
            alone_s = MIN_ROUNDS * play_off_process_s(*history.best) if history.best is not None else 0.0
            wanted_s = WANTED_ROUNDS * (MOST_FINALISTS + 1) * expected_s if has_baseline else alone_s
            rounds_s = min(wanted_s, MAX_SHARE * shared_s)
            rounds_s = max(rounds_s, FEWEST_ROUNDS * round_s + self._unknown_checks_s(expected_s))
            rounds_s = max(rounds_s * (not self.is_settled), (LEAST_ROUND - (not has_baseline)) * expected_s)
            undoing_s = min(self.kept_probes * expected_s, UNDO_SHARE * shared_s)
            leave_s = rounds_s + undoing_s + guest_s
        return self.free_s - expected_s - leave_s

    @staticmethod
    def _lead_s(history: History) -> tuple[float, float] | None:
        """Seconds that the best took, and that a round of it and the baseline takes; None where these are not two that ran."""
        best, baseline = history.best, history.baseline
        if best is None or baseline is None or not baseline.ok or best[0] == history.space.baseline:
            return None
        return best[1].running_s, play_off_process_s(*best) + play_off_process_s(history.space.baseline, baseline)

    def is_worth(self, gain: float, cost_s: float, history: History) -> bool:
        """Whether so much more search pays: what it is expected to gain, over the training that is ahead, is more than its time.

        The rule stops where the expected improvement per unit of cost falls to one: Xie et al., Cost-aware stopping for Bayesian
        optimization (2025). Where energy is searched for, joules stand on both sides: searching draws about the power of training,
        so the power falls out, and what is left are seconds again.

        Args:
            gain: expected, as the logarithm of the merit over that of the best so far.
            cost_s: seconds that it takes.
        """
        if not self.is_auto or not history.objective.rests_on_speed:
            return True
        return gain * self._ahead_s(history) > cost_s

    def _ahead_s(self, history: History) -> float:
        """Seconds of training ahead with the best so far."""
        samples, best = history.objective.train_samples, history.best
        if samples is None or best is None or best[1].measurement is None:
            return AHEAD_S
        return samples / best[1].measurement.samples_per_s

    def num_finalists(self, candidates_s: Sequence[float], baseline_s: float) -> int:
        """How many finalists the time that is left can confirm beside the baseline.

        At least two where there is any time: a single one may have been lucky, or may not fit a second time.

        Args:
            candidates_s: seconds that a process of each takes, best first.
            baseline_s: the same of the baseline; 0 where it does not play.
        """

        def affordable(rounds: int) -> int:
            return sum(rounds * (baseline_s + together_s) <= self.free_s for together_s in accumulate(candidates_s))

        return max(1, min(2, affordable(FEWEST_ROUNDS)), affordable(WANTED_ROUNDS))

    def allows_a_round(self, round_s: float, number: int) -> bool:
        """Whether there is time for a round. The first may use the overrun too: without it there is no confirmed answer."""
        return round_s < (self.free_s if number else self.left_s(has_answer=True))

    def expected_probe_s(self, history: History) -> float:
        """Seconds that the next probe will take, judged by the latest ones."""
        return median(self._latest_s(history))

    @staticmethod
    def _latest_s(history: History) -> list[float]:
        """Seconds that the latest probes took."""
        return history.probe_wall_s[-RECENT:] or [0.0]

    def add_run(self, outcome: Outcome, num_slots: int) -> None:
        """Count the time of a process that ran a probe. A process that shares the machine counts for its share of the slots."""
        training_s, compiling_s = outcome.spent_training_s, outcome.compiling_s
        if outcome.kind is Kind.TIMEOUT:
            self.lost_s += outcome.wall_s
        probes_s = outcome.running_s - training_s
        for name, seconds in (("training", training_s), ("compiling", compiling_s), ("probes", probes_s)):
            self.spent_s[name] = self.spent_s.get(name, 0.0) + seconds / num_slots

    @contextlib.contextmanager
    def split(self, name: str) -> Iterator[None]:
        """Add the time spent inside the block to `spent_s[name]`, and tell that it begins."""
        self.begins(name)
        before_s = self.now_s()
        try:
            yield
        finally:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + self.now_s() - before_s


def play_off_process_s(config: Config, outcome: Outcome) -> float:
    """Seconds that a process takes in the play-off at first, of a config that ran in the search.

    It trains no largest batches, asks no more what grows, and times as little as it can: the steps of a warm-up, of one micro batch
    each, and one more.
    """
    if (found := outcome.measurement) is None:
        return outcome.running_s
    update_s = found.phases_s.get("optimizer", 0.0)
    part_s = (found.step_s - update_s) / config.accumulation_steps + update_s
    timed_s = max(part_s, OVERTIME * SHORTEST_TIMED_S - part_s)
    steps_s = found.compile_s + MIN_WARMUP_STEPS * part_s + timed_s
    return min(outcome.running_s, MARGIN * (outcome.running_s - outcome.spent_training_s - found.growth_s + steps_s))


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a probe may have run, given how far it has come.

    Attributes:
        batch_size: samples of a micro step.
        num_at_once: micro steps that a warm-up reports only together, at the most.
        step_s: seconds that what it is compared with takes for a micro step plus the update; infinite where nothing is known.
        factor: how many times `step_s` is waited.
        begin_s: for set-up and for what only a first step does (compiling, say).
        warmup_s: for what other probes needed before they could be timed; granted once a micro step is done.
        most_s: longest wait for the first steps, or for any later one; never so short that what is ended may be the faster one.
        front: the Pareto front of what was measured; empty where neither speed nor memory decides.
    """

    batch_size: int
    num_at_once: int
    step_s: float
    factor: float
    begin_s: float
    warmup_s: float
    most_s: float
    front: Front

    def allowed_s(self, progress: Progress) -> float:
        """Seconds from its start after which a probe that has come this far is ended."""
        if not (done := progress.num_micro_steps):
            return self.begin_s + min(self.most_s, self.factor * self.num_at_once * self.step_s)
        factor = LENIENCE if self._may_enter_the_front(progress) else self.factor
        return (
            self._begun_s(progress)
            + factor * done * self.step_s
            + min(self.most_s, factor * self.num_at_once * self.step_s)
        )

    def bound(self, progress: Progress, elapsed_s: float) -> Bound | None:
        """What is known of a config whose probe ends here, taking unfinished micro steps to end now. None while it compiles."""
        if progress.stage == COMPILING:
            return None
        num_micro = progress.num_micro_steps + self.num_at_once
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
        known = f", where {format_seconds(self.step_s)} a micro step were expected"
        return f"ended {done} in {format_seconds(elapsed_s)}{known if self.step_s < math.inf else ''}"

    def _begun_s(self, progress: Progress) -> float:
        return self.begin_s + (self.warmup_s if progress.num_micro_steps else 0.0)

    def _may_enter_the_front(self, progress: Progress) -> bool:
        high = progress.samples_per_s_high
        return high is None or not any(peak <= progress.peak_bytes and speed >= high for peak, speed in self.front)


def patience_for(
    proposal: Proposal, history: History, budget: Budget, inspection: Inspection, slowest_start: float = 1.0
) -> Patience:
    """How long a proposal's probe may take. For `slowest_start` see `Runner`.

    What is searched is compared with the best so far, a config of the play-off with what it did before. The baseline is
    compared with the inspection's step of a few samples, which was cold; so is everything else as long as nothing is feasible.
    Where a probe that was cut short is all that it is compared with, no speed is expected.
    """
    config = proposal.config
    samples = config.batch_size * inspection.known_world.data_parallel  # of a micro step of all processes
    setup_s = history.setup_s(config)
    ran = [  # a config that takes longer to prepare (to compile, say) tells nothing of this one's first step
        (known, outcome.measurement, outcome)
        for known, outcome in history.known.items()
        if outcome.measurement and history.setup_s(known) <= setup_s
    ]
    best = history.best[1] if history.best is not None else None
    compared = history.known.get(config) if proposal.stage == PLAY_OFF else best
    if proposal.stage == BASELINE or compared is None or compared.measurement is None:
        step_s, factor = config.batch_size * (inspection.sample_s or math.inf), LENIENCE
    elif compared.measurement.cut_short:  # the steps of its warm-up do not tell how long training waits for data
        step_s, factor = math.inf, LENIENCE
    else:
        found = compared.measurement
        step_s = samples / found.samples_per_s + found.phases_s.get("optimizer", 0.0)
        factor = LENIENCE if proposal.stage == PLAY_OFF else PATIENCE
    larger = [max(1.0, config.batch_size / known.batch_size) for known, _, _ in ran]  # more samples take longer to make
    set_up_s = max(
        (grown * (o.running_s - o.spent_training_s) for grown, (_, _, o) in zip(larger, ran, strict=True)),
        default=budget.spent_s.get("inspection", 0.0),
    )
    first_s = max([FIRST_STEP_S, inspection.step_s or 0.0, *(found.compile_s for _, found, _ in ran)])
    num_at_once = min(2, config.accumulation_steps)
    most_s = max(FEWEST_LOST_S, LOST_SHARE * budget.budget_s - budget.lost_s)
    if proposal.stage in (BASELINE, PLAY_OFF):
        most_s = math.inf
    elif step_s < math.inf:
        most_s = max(most_s, PATIENCE * num_at_once * step_s)
    return Patience(
        batch_size=samples,
        num_at_once=num_at_once,
        step_s=step_s,
        factor=factor,
        begin_s=slowest_start * set_up_s + first_s + COMPILING_PATIENCE * setup_s,
        warmup_s=max((grown * found.warmup_s for grown, (_, found, _) in zip(larger, ran, strict=True)), default=0.0),
        most_s=most_s,
        front=() if history.objective.observed else rates_on_front(history.feasible),
    )


def rates_on_front(feasible: dict[Config, Outcome]) -> Front:
    """Peak and throughput of each measured config that no other beats in both."""
    found = [(float(m.peak_bytes), m.samples_per_s) for o in feasible.values() if (m := o.measurement)]
    return tuple(pareto_front(found, lambda point: point))
