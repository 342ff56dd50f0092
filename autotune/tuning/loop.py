"""The search loop: baseline, starting design, sampler, undoing changes, play-off. One probe at a time, nothing lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from optuna.trial import Trial

from autotune.config import Choice, Config
from autotune.outcome import Kind, Outcome, calmer
from autotune.predict.memory import PeakSource
from autotune.probe.prober import Prober
from autotune.probe.process import ProbeFault
from autotune.probe.settings import ProbeSettings
from autotune.tuning.cost_model import CostModelSampler
from autotune.tuning.events import Listener, Note, ProbeEnded, ProbeStarted
from autotune.tuning.objective import Objective
from autotune.tuning.options import COST_MODEL
from autotune.tuning.playoff import Standing, play_off
from autotune.tuning.sampler import make_sampler
from autotune.tuning.space import Space, SpaceExhausted
from autotune.tuning.start import one_change_back, starting_configs
from autotune.tuning.study import Probed, Store
from autotune.tuning.walls import MemoryWalls

MIN_TIMEOUT_S = 20.0
TIMEOUT_FACTOR = 6.0  # of the baseline's wall time
HOPELESS = 0.5  # of the baseline's throughput: what is slower than that is not worth timing
NUM_FINALISTS = 3
LIKELY = 0.5
SURE_TO_FIT = 0.97  # of the usable memory: peaks of single processes differ by a few per cent
SAFE = 0.9  # of it: who comes in for one that failed must not fail likewise
NEAR_BEST = 0.93  # single processes differ by this much on a busy machine; who is this near the best may be the best
PATIENCE = 12  # probes without a better one by 1 % after which the sampler is taken to know enough
BETTER = 1.01
PLAY_OFF_INTERVAL = 0.01
PLAY_OFF_MIN_TIMED_S = 0.5
WANTED_ROUNDS = 5  # processes differ more than blocks within one, so many short rounds beat a few long ones
FEWEST_ROUNDS = 2  # without a second round there is no interval between processes,
FEWEST_ROUNDS_OVERRUN = 1.2  # which is worth this much of the budget
MAX_PLAY_OFF_SHARE = 0.4  # of the budget
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
    train_s: float = 0.0
    best: tuple[Config, Outcome] | None = None
    baseline: Outcome | None = None
    _faults: int = 0
    _num_probes: int = 0

    def __post_init__(self) -> None:
        self._deadline_s = self.budget_s + self.settings.timeout_s  # a search takes its budget and one time-out at most
        self._known: dict[Config, Outcome] = {}
        self._cost_model = self._new_cost_model()
        self._walls = MemoryWalls(self.peaks)
        for probe in self.store.probed():
            gave_up_early = probe.outcome.kind is Kind.TIMEOUT and probe.outcome.wall_s < 0.9 * self.settings.timeout_s
            if probe.config == self.space.baseline and gave_up_early:
                continue  # this run has more patience
            if probe.stage != "play-off":
                self.wall_s.append(probe.outcome.wall_s)
                self._learn(probe.config, probe.outcome)
        if self.baseline is not None:
            self._expect_like(self.baseline)

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
            self._probe_once(self.space.baseline, "baseline", "what you run today" if given else "plain fp32")
            outcome = self._known.get(self.space.baseline)
            too_large = outcome is not None and (outcome.kind is Kind.OOM or self.objective.beyond_memory(outcome))
            smaller = self.space.with_smaller_baseline()
            if given or not too_large or smaller is None or self.interrupted():
                break
            self._search_in(smaller)
            self.store.set_attribute("baseline_config", smaller.baseline.as_dict())
        self.baseline = self._known.get(self.space.baseline)
        if self.baseline is not None and self.baseline.ok:
            self.objective = self.objective.with_baseline(self.baseline)
            self._expect_like(self.baseline)

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
        return self.store.forecast(self._cost_model, config).chance_to_fit > LIKELY

    def run_play_off(self) -> Standing:
        """Confirm the best few and the baseline in fresh processes."""
        settings = self.settings.replace(
            interval=PLAY_OFF_INTERVAL,
            slowest_samples_per_s=0.0,
            max_timed_s=max(PLAY_OFF_MIN_TIMED_S, self.settings.max_timed_s / 2),
        )
        finalists = self.finalists()
        if finalists:
            self.listener.on(Note(text=f"play-off: {len(finalists)} configs and the baseline, in fresh processes"))

        def run(config: Config, number: int) -> Outcome | None:
            outcome = None
            while outcome is None and not self.interrupted() and self.elapsed_s < self._deadline_s:
                trial = self.store.begin(config, self.space)  # once more after a fault of the machinery
                outcome = self._run_trial(
                    trial, config, "play-off", f"round {number + 1}", settings=settings, round=number
                )
            return outcome

        def has_time(round_s: float, number: int) -> bool:
            overrun = FEWEST_ROUNDS_OVERRUN if number < FEWEST_ROUNDS else 1.0
            return number < 1 or self.elapsed_s + round_s < overrun * self.budget_s

        baseline_runs = self.baseline is not None and self.objective.feasible(self.baseline)
        return play_off(
            finalists,
            self.space.baseline if baseline_runs else None,
            run=run,
            objective=self.objective,
            has_time=has_time,
            seed=self.seed,
            substitutes=self._substitutes(finalists),
        )

    def finalists(self) -> list[Config]:
        """The best few, best first by what all probes together say: as many as the time that is left can confirm."""
        ranked = self.store.ranked(self._cost_model)
        if not ranked:
            return []
        merits = {config: self.objective.merit(self._known[config]) for config in ranked}
        # those that surely fit come first, and are measured against each other
        sure = [config for config in ranked if not self._may_exceed_the_limit(config)]
        near: list[Config] = []
        for group in (sure, [config for config in ranked if config not in sure]):
            best = max((merits[config] for config in group), default=0.0)
            near += [c for c in group if merits[c] >= NEAR_BEST * best and c != self.space.baseline]
        affordable = [  # the baseline plays, too
            int((self.budget_s - self.elapsed_s) / (rounds * median(self.wall_s))) - 1
            for rounds in (WANTED_ROUNDS, FEWEST_ROUNDS)
        ]
        # two at the least where there is any time: one alone may be a lucky one, or not fit a second time
        return near[: max(1, min(2, affordable[1]), min(NUM_FINALISTS, affordable[0]))]

    def _substitutes(self, finalists: list[Config]) -> list[Config]:
        """Who comes in for a finalist that fails: the best that surely fit, however far behind."""
        others = (c for c in self.store.ranked(self._cost_model) if c not in (*finalists, self.space.baseline))
        return [config for config in others if not self._may_exceed_the_limit(config, SAFE)]

    def _may_exceed_the_limit(self, config: Config, share: float = SURE_TO_FIT) -> bool:
        """Whether another process of a config that fits may not."""
        measured = self._known[config].measurement
        return measured is not None and measured.peak_bytes > share * self.objective.usable_bytes

    def drop(self, name: str, choice: Choice) -> None:
        """Take a choice of a technique out of the space, and the best with it."""
        self._search_in(self.space.without(name, {choice}))
        self.best = None
        for config, outcome in self._known.items():
            self._consider(config, outcome)

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
        self._run_trial(trial, config, "search", "" if self.sampler == COST_MODEL else f"proposed by {self.sampler}")
        return True

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
        forecast = None if stage == "play-off" else self.store.forecast(self._cost_model, config)
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
        objective = self.objective.in_play_off() if stage == "play-off" else self.objective
        self.store.finish(trial, outcome, objective, worst=self._worst(), disturbed=disturbed)
        if stage != "play-off":
            self._num_probes += 1
            self._learn(config, outcome)
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
        return outcome

    def _run(self, config: Config, settings: ProbeSettings) -> Outcome:
        left_s = max(1.0, self._deadline_s - self.elapsed_s)
        outcome = self.prober.run(config, settings.replace(timeout_s=min(settings.timeout_s, left_s)))
        self.wall_s.append(outcome.wall_s)
        self.train_s += outcome.measurement.train_s if outcome.measurement else outcome.train_s
        return outcome

    def _learn(self, config: Config, outcome: Outcome) -> None:
        self._known[config] = outcome
        if config == self.space.baseline:
            self.baseline = outcome
            if outcome.ok:
                self.objective = self.objective.with_baseline(outcome)
        if outcome.kind is Kind.OOM or (outcome.measurement and self.objective.beyond_memory(outcome)):
            self._walls.add(config)
        self._consider(config, outcome)

    def _consider(self, config: Config, outcome: Outcome) -> None:
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
        return self.elapsed_s + expected_s < self.budget_s - self._play_off_s()

    def _play_off_s(self) -> float:
        """Time to leave for the play-off: its fewest rounds, which time twice as long, up to a share of the budget."""
        typical_s = median(self.wall_s[-8:]) if self.wall_s else 0.0
        return min(WANTED_ROUNDS * (NUM_FINALISTS + 1) * typical_s, MAX_PLAY_OFF_SHARE * self.budget_s)

    def _expect_like(self, baseline: Outcome) -> None:
        """Take the baseline for the measure of how long a probe may take and how slow it may be."""
        if baseline.measurement is None:
            return
        self.settings = self.settings.replace(slowest_samples_per_s=HOPELESS * baseline.measurement.samples_per_s)
        if self.timeout_s is None:
            self.settings = self.settings.replace(timeout_s=max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * baseline.wall_s))

    def _best_score(self) -> float | None:
        return self.objective.score(self.best[1]) if self.best else None

    def _worst(self) -> float:
        """The worst feasible score so far, so that a sampler's model is not bent by an arbitrary figure."""
        scores = [self.objective.score(outcome) for outcome in self._known.values() if self.objective.feasible(outcome)]
        return min(scores, default=self.objective.worst())
