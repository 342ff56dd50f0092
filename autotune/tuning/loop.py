"""The search loop: baseline, starting design, sampler, undoing changes, play-off. One probe at a time, nothing lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from optuna.trial import Trial

from autotune.predict.memory import PeakSource
from autotune.proposers.cost_model import CostModelSampler
from autotune.proposers.design import one_change_back, starting_configs
from autotune.proposers.optuna_samplers import make_sampler
from autotune.records.config import Choice, Config
from autotune.records.objective import Objective
from autotune.records.options import COST_MODEL
from autotune.records.outcome import Kind, Outcome, calmer
from autotune.records.prediction import Forecast
from autotune.records.settings import ProbeSettings
from autotune.runners.local import ProbeFault
from autotune.runners.runner import Prober
from autotune.space import Space, SpaceExhausted
from autotune.study.history import what_stands
from autotune.study.known_oom import MemoryWalls
from autotune.study.store import Probed, Store
from autotune.tuning import finalists
from autotune.tuning.events import Listener, Note, ProbeEnded, ProbeStarted
from autotune.tuning.playoff import Standing, play_off
from autotune.tuning.why import as_error, without_digits

MIN_TIMEOUT_S = 20.0
TIMEOUT_FACTOR = 6.0  # of the baseline's wall time
UNKNOWN_TIME_SHARE = 0.15  # of the budget: for a probe as long as nothing has run
HOPELESS = 0.5  # of the baseline's throughput: what is slower than that is not worth timing
LIKELY = 0.5
PATIENCE = 12  # probes without a better one by 1 % after which the sampler is taken to know enough
BETTER = 1.01
PLAY_OFF_INTERVAL = 0.01
PLAY_OFF_MIN_TIMED_S = 0.5
NOT_COMPUTED = (ArithmeticError, ValueError)  # what the models' arithmetic raises; numpy's LinAlgError is a ValueError
NOT_COMPUTED_NOTE = "the models of speed and memory could not be computed; configs of the starting design are probed"
SAME_ERRORS = 3  # of unlike configs, when nothing has run, that end the search
MAX_FAULTS = 3  # failures of the machinery itself before the search gives up


@dataclass
class Loop:
    """One run of a search over a space.

    Attributes:
        prober: runs the configs.
        store: keeps them; finished probes of an earlier run count as measured.
        settings: of every probe; the time-out is replaced once the baseline's time is known.
        interrupted: asked before every probe.
        started: `time.monotonic()` when the user started to wait.
        peaks: traced memory peaks of the space's configs, or None where the model cannot be traced.
        outside_bytes: what a probe's process holds before it builds the model.
        starting: the configs to begin with where the sampler has no knowledge of its own.
    """

    prober: Prober
    store: Store
    space: Space
    objective: Objective
    settings: ProbeSettings
    listener: Listener
    interrupted: Callable[[], bool]
    budget_s: float
    started: float
    num_trials: int | None
    sampler: str
    seed: int
    timeout_s: float | None
    peaks: PeakSource | None
    outside_bytes: int
    starting: Callable[..., list[tuple[Config, str]]] = starting_configs
    wall_s: list[float] = field(default_factory=list)
    best: tuple[Config, Outcome] | None = None
    baseline: Outcome | None = None
    _faults: int = 0
    _is_told: bool = False  # that the models could not be computed
    _num_probes: int = 0

    def __post_init__(self) -> None:
        self._deadline_s = self.budget_s + self.settings.timeout_s  # a search takes its budget and one time-out at most
        self._known: dict[Config, Outcome] = {}
        self._forgiven: set[int] = set()  # numbers of trials that failed in an earlier search and are worth another try
        self.failed_again: dict[Config, Outcome] = {}  # what ran in the search, and did not in the play-off
        self._walls = MemoryWalls()
        self._resume(self.store.probed())
        self._cost_model = self._new_cost_model()

    def _resume(self, probes: list[Probed]) -> None:
        """Learn what the study knows, but for what is worth another try."""
        self._resume_search([probe for probe in probes if probe.stage != "play-off"])
        self._resume_play_off([probe for probe in probes if probe.stage == "play-off" and not probe.feasible])

    def _resume_search(self, probes: list[Probed]) -> None:
        baselines = [self.space.baseline, *(probe.config for probe in probes if probe.stage == "baseline")]
        found: dict[Config, list[Probed]] = {config: [] for config in baselines}  # the others are held against these
        for probe in probes:
            found.setdefault(probe.config, []).append(probe)
        for config, past in found.items():
            outcomes = [probe.outcome for probe in past]
            stands = what_stands(outcomes, self.settings.timeout_s, baseline=config in baselines) if past else None
            if stands is None:
                self._forgiven |= {probe.number for probe in past}
                continue
            self.wall_s += [outcome.wall_s for outcome in outcomes]
            self._learn(config, stands)
            if config in baselines:
                self._expect_like(stands)

    def _resume_play_off(self, failed: list[Probed]) -> None:
        """What did not fit into the memory there is no longer feasible; other failures may pass."""
        for probe in failed:
            if self.objective.does_not_fit(probe.outcome):
                self._fail_again(probe.config, probe.outcome)
            else:
                self._forgiven.add(probe.number)

    @property
    def left_s(self) -> float:
        """Until the search must have ended: its budget and one time-out."""
        return self._deadline_s - self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Since the user started to wait."""
        return time.monotonic() - self.started

    def measure_baseline(self, *, given: bool) -> None:
        """Probe the baseline; one that the user did not state is halved until it fits."""
        while True:
            self._probe_baseline("what you run today" if given else "plain fp32")
            outcome = self._known.get(self.space.baseline)
            too_large = outcome is not None and self.objective.does_not_fit(outcome)
            smaller = self.space.with_smaller_baseline()
            if given or not too_large or smaller is None or self.interrupted():
                break
            self._search_in(smaller)
            self.store.set_attribute("baseline_config", smaller.baseline.as_dict())
        self.baseline = self._known.get(self.space.baseline)
        if self.baseline is not None and self.baseline.ok:
            self.objective = self.objective.with_baseline(self.baseline)
            self._expect_like(self.baseline)
            self._choose_best()  # a study may know others from before
        elif self.timeout_s is None:
            most_s = max(MIN_TIMEOUT_S, UNKNOWN_TIME_SHARE * self.budget_s)
            self.settings = self.settings.replace(timeout_s=min(self.settings.timeout_s, most_s))

    def _probe_baseline(self, reason: str) -> None:
        """Probe it, once more after each fault of the machinery: without it nothing bounds the time of the others."""
        faults = None
        while self._faults != faults:
            faults = self._faults
            self._probe_once(self.space.baseline, "baseline", reason)

    def explore(self) -> None:
        """Probe what promises most, until nothing does or the play-off's time has come.

        The cost model knows what techniques usually do, and when it knows enough. The other samplers are given a starting
        design first, and stop when nothing better has come up for a while.
        """
        if self.sampler == COST_MODEL:
            self.store.use_sampler(self._cost_model)
            while self._may_go_on() and self._probe_proposed():
                pass
            return
        fits = self.baseline is not None and self.objective.feasible(self.baseline)
        for config, reason in self.starting(self.space, baseline_fits=fits, objective=self.objective.name):
            if not self._may_go_on():
                return
            self._probe_once(config, "search", reason)
        self.undo_changes()  # what usually helps may hurt here
        self.store.use_sampler(make_sampler(self.sampler, self.space, self._admissible, self.seed))
        since_better = 0
        while self._may_go_on() and (self.sampler == "grid" or since_better < PATIENCE):
            best_before = self._best_score()
            if not self._probe_proposed():
                break
            improved = best_before is None or (self._best_score() or best_before) > best_before + abs(best_before) * (
                BETTER - 1
            )
            since_better = 0 if improved else since_better + 1

    def undo_changes(self) -> None:
        """Probe the best with each change undone, best first again when one of those is better.

        What is predicted not to fit would tell nothing of a technique.
        """
        tried: set[Config] = set()
        while self.best is not None and self.best[0] not in tried and self._may_go_on():
            tried.add(self.best[0])
            for config, reason in one_change_back(self.best[0], self.space):
                if self._may_go_on() and self._is_expected_to_fit(config):
                    self._probe_once(config, "ablation", reason)

    def _is_expected_to_fit(self, config: Config) -> bool:
        """Where predictions guide the search: the other samplers go without."""
        if self.sampler != COST_MODEL:
            return True
        forecast = self._forecast(config)
        return forecast is None or forecast.chance_to_fit > LIKELY

    def run_play_off(self, admit: Callable[[Config], bool] = lambda config: True) -> Standing | None:
        """Confirm the best few and the baseline in fresh processes; None when not one round was completed.

        Args:
            admit: asked of a config that is about to come in for one that failed.
        """
        settings = self.settings.replace(
            interval=PLAY_OFF_INTERVAL,
            slowest_samples_per_s=0.0,
            max_timed_s=max(PLAY_OFF_MIN_TIMED_S, self.settings.max_timed_s / 2),
        )
        playing = self.finalists()
        if playing:
            self.listener.on(Note(text=f"play-off: {len(playing)} configs and the baseline, in fresh processes"))

        def run(config: Config, number: int) -> Outcome | None:
            outcome = None
            while outcome is None and not self.interrupted() and self.left_s > 0:
                trial = self.store.begin(config, self.space)  # once more after a fault of the machinery
                reason = f"round {number + 1}"
                outcome = self._run_trial(trial, config, "play-off", reason, settings=settings, round=number)
            return outcome

        waiting = finalists.substitutes(self._ranked(), self.objective, (*playing, self.space.baseline))
        failed = self.space.baseline in self.failed_again
        baseline_runs = self.baseline is not None and self.objective.feasible(self.baseline) and not failed
        return play_off(
            playing,
            self.space.baseline if baseline_runs else None,
            run=run,
            objective=self.objective,
            has_time=lambda round_s, number: finalists.may_play(number, self.elapsed_s + round_s, self.budget_s),
            seed=self.seed,
            substitutes=filter(admit, waiting),  # asked one by one, when its turn comes
        )

    def finalists(self) -> list[Config]:
        """The best few, best first by what all probes together say: as many as the time that is left can confirm."""
        near = finalists.near_the_best(self._ranked(), self.objective)
        others = [config for config in near if config != self.space.baseline]
        if not others:
            return []
        return others[: finalists.affordable(self.budget_s - self.elapsed_s, median(self.wall_s))]

    def _ranked(self) -> dict[Config, Outcome]:
        """What is feasible, best first by what all probes together say."""
        try:
            ranked = self.store.ranked(self._cost_model)
        except NOT_COMPUTED as error:
            self._tell_not_computed(error)
            feasible = [config for config, outcome in self._known.items() if self.objective.feasible(outcome)]
            ranked = sorted(feasible, key=lambda config: -self.objective.score(self._known[config]))
        return {config: self._known[config] for config in ranked if config in self._known}

    def _forecast(self, config: Config) -> Forecast | None:
        """What the finished probes predict of a config; None where the models cannot be computed."""
        try:
            return self.store.forecast(self._cost_model, config)
        except NOT_COMPUTED as error:
            self._tell_not_computed(error)
            return None

    def _tell_not_computed(self, error: Exception) -> None:
        """Say once that the models failed, and what happens instead."""
        if not self._is_told:
            self._is_told = True
            what = f"{type(error).__name__}: {error}"
            self.listener.on(Note(text=f"{NOT_COMPUTED_NOTE} ({what})", warning=True))

    def drop(self, name: str, choice: Choice) -> None:
        """Take a choice of a technique out of the space, and the best with it."""
        self._search_in(self.space.without(name, {choice}))
        self._choose_best()

    def known(self) -> list[tuple[Config, Outcome]]:
        """Every config that was probed, with its outcome."""
        return list(self._known.items())

    def probed(self) -> list[Probed]:
        """Every probe of the study but the play-off's."""
        return [probe for probe in self.store.probed() if probe.stage != "play-off"]

    def _probe_once(self, config: Config, stage: str, reason: str) -> None:
        if config not in self._known and self._admissible(config, outside_space=True) and not self.interrupted():
            self._run_trial(self.store.begin(config, self.space), config, stage, reason)

    def _search_in(self, space: Space) -> None:
        """Go on in another space."""
        self.space = space
        self._cost_model = self._new_cost_model()

    def _new_cost_model(self) -> CostModelSampler:
        return CostModelSampler(
            self.space,
            self.objective,
            self._admissible,
            peaks=self.peaks,
            outside_bytes=self.outside_bytes,
            seed=self.seed,
            forgiven=self._forgiven,
        )

    def _probe_proposed(self) -> bool:
        small = self.space.num_combinations <= 2000
        if small and not any(self._admissible(config) for config in self.space):
            return False
        try:
            trial, config = self.store.propose(self.space)
        except SpaceExhausted:
            self.store.abandon_running()
            return False
        except NOT_COMPUTED as error:
            self.store.abandon_running()
            self._tell_not_computed(error)
            return self._probe_next_of_start()
        self._run_trial(trial, config, "search", "" if self.sampler == COST_MODEL else f"proposed by {self.sampler}")
        return True

    def _probe_next_of_start(self) -> bool:
        """Probe the next config of the starting design; whether one was left."""
        fits = self.baseline is not None and self.objective.feasible(self.baseline)
        for config, reason in self.starting(self.space, baseline_fits=fits, objective=self.objective.name):
            if self._admissible(config):
                self._probe_once(config, "search", reason)
                return True
        return False

    def _run_trial(
        self,
        trial: Trial,
        config: Config,
        stage: str,
        reason: str,
        *,
        settings: ProbeSettings | None = None,
        **extra: int,
    ) -> Outcome | None:
        """Run one probe, once more when it was disturbed, and tell the study. None when the machinery itself failed."""
        settings = settings or self.settings
        number = trial.number
        forecast = None if stage == "play-off" else self._forecast(config)
        reason = reason or (forecast.reason if forecast else "")
        self.store.describe(trial, config, stage=stage, reason=reason, forecast=forecast, **extra)
        self.listener.on(
            ProbeStarted(
                number=number,
                stage=stage,
                config=config,
                reason=reason,
                forecast=forecast,
                elapsed_s=self.elapsed_s,
            )
        )
        try:
            outcome = self._run(config, settings)
            disturbed = outcome.measurement is not None and bool(outcome.measurement.disturbances)
            if disturbed and not self.interrupted() and self.elapsed_s + outcome.wall_s < self.budget_s:
                outcome = calmer(outcome, self._run(config, settings))
        except ProbeFault as fault:
            self.store.fail(trial, str(fault))
            self._faults += 1
            self.listener.on(Note(text=str(fault), warning=True))
            if self._faults >= MAX_FAULTS:
                raise
            return None
        except BaseException:
            self.store.fail(trial, "interrupted")
            raise
        if stage == "play-off" and outcome.kind is Kind.TIMEOUT and self.left_s <= 0:
            # killed for want of time, not of patience: that tells nothing of the config
            self.store.fail(trial, "cut short by the end of the search")
            return None
        objective = self.objective.in_play_off() if stage == "play-off" else self.objective
        self.store.finish(trial, outcome, objective, worst=self._worst(), disturbed=disturbed)
        if stage != "play-off":
            self._num_probes += 1
            self._learn(config, outcome)
            if outcome.ok and not (self.baseline and self.baseline.ok):
                self._expect_time_of(outcome)
        elif not objective.feasible(outcome):
            self._fail_again(config, outcome)
        self.listener.on(
            ProbeEnded(
                number=number,
                stage=stage,
                config=config,
                outcome=outcome,
                forecast=forecast,
                feasible=objective.feasible(outcome),
                best=self.best,
                baseline=self.baseline,
                elapsed_s=self.elapsed_s,
            )
        )
        if outcome.kind is Kind.ERROR and stage != "play-off":
            self._end_if_everything_fails_so(outcome)
        return outcome

    def _end_if_everything_fails_so(self, outcome: Outcome) -> None:
        """End the search when nothing has run, and configs that differ in more than the batch all failed with this error.

        Raises:
            TaskError: the error, where it arose in the user's code.
            OwnFault: the error, where it arose in autotune itself.
        """
        if any(known.ok for known in self._known.values()):
            return
        unlike = {
            config.replace(batch_size=1, accumulation_steps=1)
            for config, known in self._known.items()
            if known.kind is Kind.ERROR and without_digits(known.cause) == without_digits(outcome.cause)
        }
        if len(unlike) >= SAME_ERRORS:
            raise as_error(outcome, f"{len(unlike)} unlike configs ended with this error and none ran")

    def _run(self, config: Config, settings: ProbeSettings) -> Outcome:
        left_s = max(1.0, self._deadline_s - self.elapsed_s)
        outcome = self.prober.run(config, settings.replace(timeout_s=min(settings.timeout_s, left_s)))
        self.wall_s.append(outcome.wall_s)
        return outcome

    def _learn(self, config: Config, outcome: Outcome) -> None:
        self._known[config] = outcome
        if config == self.space.baseline:
            self.baseline = outcome
            if outcome.ok:
                self.objective = self.objective.with_baseline(outcome)
        if self.objective.does_not_fit(outcome):
            self._walls.add(config)
        self._consider(config, outcome)

    def _fail_again(self, config: Config, outcome: Outcome) -> None:
        self.failed_again[config] = outcome
        if self.objective.does_not_fit(outcome):
            self._walls.add(config)
        self._choose_best()

    def _choose_best(self) -> None:
        self.best = None
        for config, outcome in self._known.items():
            self._consider(config, outcome)

    def _consider(self, config: Config, outcome: Outcome) -> None:
        if config in self.failed_again:
            return
        if self.objective.feasible(outcome) and self.space.contains(config):
            score = self.objective.score(outcome)
            if self.best is None or score > self.objective.score(self.best[1]):
                self.best = (config, outcome)

    def _admissible(self, config: Config, *, outside_space: bool = False) -> bool:
        """Neither measured, nor larger than what ran out of memory, nor outside the space."""
        return (
            config not in self._known
            and not self._walls.rule_out(config)
            and (outside_space or self.space.contains(config))
        )

    def _may_go_on(self) -> bool:
        if self.interrupted() or (self.num_trials is not None and self._num_probes >= self.num_trials):
            return False
        expected_s = median(self.wall_s[-8:]) if self.wall_s else 0.0
        # while nothing fits there is nothing to confirm
        leave_s = finalists.time_to_leave(expected_s, self.budget_s) if self.best else expected_s
        return self.elapsed_s + expected_s < self.budget_s - leave_s

    def _expect_like(self, baseline: Outcome) -> None:
        """Take the baseline for the measure of how long a probe may take and how slow it may be."""
        if baseline.measurement is None:
            return
        self.settings = self.settings.replace(slowest_samples_per_s=HOPELESS * baseline.measurement.samples_per_s)
        self._expect_time_of(baseline)

    def _expect_time_of(self, ran: Outcome) -> None:
        """Take what ran for the measure of how long a probe may take."""
        if self.timeout_s is None:
            self.settings = self.settings.replace(timeout_s=max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * ran.wall_s))

    def _best_score(self) -> float | None:
        return self.objective.score(self.best[1]) if self.best else None

    def _worst(self) -> float:
        """The worst feasible score so far, so that a sampler's model is not bent by an arbitrary figure."""
        scores = [self.objective.score(outcome) for outcome in self._known.values() if self.objective.feasible(outcome)]
        return min(scores, default=self.objective.worst())
