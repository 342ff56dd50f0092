"""The history of a search: an append-only list of trials, the views of it that guide the search, and what follows from a failure, which
may be excused (the machine stood still), tried again, or rule out similar configs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from autotune.errors import without_digits
from autotune.records.config import BATCH_KEYS, BATCH_SIZE, Choice, Config, ShapeGrowth
from autotune.records.objective import Objective
from autotune.records.outcome import Kind, Outcome
from autotune.records.study import BASELINE, Neighbours, Trial
from autotune.space import Space
from autotune.techniques import Phase

PATIENT = 0.9  # a probe that ran for this share of the time-out counts as having had all of it
PASSING = (Kind.CRASHED, Kind.ERROR)  # may be the machine's fault and go away: a full disk, another program
_NOTHING = ("", "")  # the choice that every config has


@dataclass(frozen=True, kw_only=True)
class RaisedByBatch:
    """An error that a model raises from some batch size on.

    Attributes:
        cause: with the smallest batch that raised it.
        size: of that batch.
        largest: the largest batch that ran with the same choices.
        choices: that all configs share which raised it.
    """

    cause: str
    size: int
    largest: int
    choices: frozenset[tuple[str, Choice]]

    def holds_for(self, config: Config) -> bool:
        """Whether a config has such a batch, and these choices."""
        return config.batch_size >= self.size and self.choices <= set(config.choices)


class History:
    """What is known about the configs of a search.

    `known`, `best`, `baseline` and `failed_again` are views of the trials; `running` holds the configs whose
    probes have not ended, `elsewhere` those that other searches of the study run. The space and the objective may change
    while a search runs (a smaller baseline, a choice that is left out), and the views follow.

    Args:
        trials: finished trials of earlier searches.
        timeout_s: returns the time-out of a probe now, given the baseline's outcome (None if unknown). Retryable
            failures of earlier searches do not count as known, so their configs may be probed again.
        longest_step_s: configs whose micro step is expected to take longer are not probed: a probe takes about ten steps.
        setup_left_s: returns how many seconds another probe may spend before its first step.
    """

    def __init__(
        self,
        space: Space,
        objective: Objective,
        trials: Sequence[Trial] = (),
        timeout_s: Callable[[Outcome | None], float] = lambda baseline: 0.0,
        longest_step_s: float = math.inf,
        setup_left_s: Callable[[History], float] = lambda history: math.inf,
    ) -> None:
        self.space = space
        self._setup_left_s = setup_left_s
        self.longest_step_s = longest_step_s
        self.num_resumed = sum(not trial.in_play_off for trial in trials)
        self.running: set[Config] = set()
        self.elsewhere: frozenset[Config] = frozenset()
        self.neighbours: Neighbours | None = None  # how probes at once disturb each other, once that is known
        self._objective = objective
        self._trials = list(trials)
        # number of trials, what is known of neighbours, and `known` after these
        self._known: tuple[int, Neighbours | None, dict[Config, Outcome]] = (-1, None, {})
        baselines = {space.baseline, *(trial.config for trial in trials if trial.stage == BASELINE)}
        unknown = {trial.number for trial in trials if not objective.is_known(trial.outcome)}
        self._retryable = retryable(trials, baselines, timeout_s, objective) | unknown

    def without(self, config: Config) -> History:
        """The history as it would be if a config had not been probed."""
        other = copy(self)
        other._trials = [trial for trial in self._trials if trial.config != config]
        other._known = (-1, None, {})
        return other

    def as_if_probed_after(self, num_trials: int, config: Config) -> History:
        """The history as it would be if a config had been probed after so many trials of other configs."""
        own = [trial for trial in self._trials if trial.config == config]
        other = self.without(config)
        other._trials[num_trials:num_trials] = own
        return other

    def append(self, trial: Trial) -> None:
        """Add a trial that has just finished."""
        self._trials.append(trial)

    def catch_up(self, trials: Sequence[Trial], elsewhere: frozenset[Config]) -> list[Trial]:
        """Take in what all searches of the study have found by now. Returns the trials that are new here.

        Args:
            elsewhere: the configs that the other searches run.
        """
        before = {trial.number for trial in self._trials}
        new = [trial for trial in trials if trial.number not in before]
        self.num_resumed += sum(not trial.in_play_off for trial in new)
        self._trials, self.elsewhere = list(trials), elsewhere
        return new

    @property
    def in_flight(self) -> frozenset[Config]:
        """The configs that this search or another one runs."""
        return self.elsewhere | self.running

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every finished trial, in order."""
        return tuple(self._trials)

    @property
    def searched(self) -> list[Trial]:
        """Every finished trial outside the play-off."""
        return [trial for trial in self._trials if not trial.in_play_off]

    @property
    def objective(self) -> Objective:
        """The objective, with the baseline's throughput once that is measured."""
        baseline = self.baseline
        return self._objective.with_baseline(baseline) if baseline is not None and baseline.ok else self._objective

    @property
    def known(self) -> dict[Config, Outcome]:
        """Every config that need not be probed again, with the outcome that stands."""
        if self._known[:2] != (len(self._trials), self.neighbours):
            counted = group_by_config(trial for trial in self.searched if trial.number not in self._retryable)
            known = {config: what_stands(list(map(self._weighed, found))) for config, found in counted.items()}
            self._known = len(self._trials), self.neighbours, known
        return self._known[2]

    @property
    def evidence(self) -> list[tuple[Config, Outcome]]:
        """The trials that the models learn from: those of the search whose figure is known, and failures of the play-off.

        The play-off's speeds are left out, because the machine may have become slower since the search. Where the search
        measured a config again, only the measurement that stands is kept.
        """
        found: dict[Config | int, list[Outcome]] = {}
        configs: dict[Config | int, Config] = {}
        left_out = self._says_nothing
        for trial in self._trials:
            known = self._objective.is_known(trial.outcome)
            if known and trial.number not in left_out and not (trial.in_play_off and trial.feasible):
                repeatable = trial.outcome.ok and not trial.in_play_off
                key = trial.config if repeatable else trial.number
                found.setdefault(key, []).append(self._weighed(trial))
                configs[key] = trial.config
        return [(configs[key], what_stands(outcomes)) for key, outcomes in found.items()]

    def _weighed(self, trial: Trial) -> Outcome:
        """A trial's outcome; where as many probes at once slow each other down, this is among what disturbed it, so it weighs less."""
        outcome = trial.outcome
        slowed = self.neighbours.slowed(outcome) if self.neighbours is not None else ""
        if not slowed or outcome.measurement is None:
            return outcome
        measured = replace(outcome.measurement, disturbances=(*outcome.measurement.disturbances, slowed))
        return replace(outcome, measurement=measured)

    @property
    def failed_again(self) -> dict[Config, Outcome]:
        """The configs that ran in the search but failed in the play-off, with their outcomes there."""
        left_out = self._says_nothing
        return {
            trial.config: trial.outcome
            for trial in self._trials
            if trial.in_play_off and not trial.feasible and trial.number not in left_out
        }

    @property
    def _says_nothing(self) -> frozenset[int]:
        """Numbers of the failed trials that say nothing against their configs."""
        return find_excused(self._trials) | self._retryable

    @property
    def baseline(self) -> Outcome | None:
        """The baseline's outcome; None before it was probed."""
        return self.known.get(self.space.baseline)

    @property
    def baseline_that_runs(self) -> Outcome | None:
        """The baseline's outcome where it runs, and its figure is known; None otherwise.

        One that leaves less than the headroom free is no answer, but what every answer is compared with.
        """
        outcome, again = self.baseline, self.failed_again.get(self.space.baseline)
        runs = outcome is not None and outcome.ok and self.objective.is_known(outcome)
        return outcome if runs and (again is None or again.ok) else None

    @property
    def feasible(self) -> dict[Config, Outcome]:
        """The configs of the space that may be recommended, in the order in which they were probed first."""
        objective, failed = self.objective, self.failed_again
        return {
            config: outcome
            for config, outcome in self.known.items()
            if objective.feasible(outcome) and config not in failed and self.space.answers(config)
        }

    @property
    def best(self) -> tuple[Config, Outcome] | None:
        """The feasible config whose probe scored highest, with its outcome."""
        objective = self.objective
        return max(self.feasible.items(), key=lambda item: objective.score(item[1]), default=None)

    @property
    def best_score(self) -> float | None:
        """The score of `best`."""
        best = self.best
        return self.objective.score(best[1]) if best else None

    @property
    def worst_score(self) -> float:
        """The worst feasible score. Samplers get it for trials without a score; an arbitrary figure would distort their models."""
        objective = self.objective
        scores = [objective.score(outcome) for outcome in self.known.values() if objective.feasible(outcome)]
        return min(scores, default=objective.worst())

    @property
    def probe_wall_s(self) -> list[float]:
        """Seconds that each trial took, in order, without compiling, which few configs need; retryable failures are left out."""
        return [trial.outcome.running_s for trial in self._trials if trial.number not in self._retryable]

    def setup_s(self, config: Config) -> float:
        """Seconds that a config is expected to take before its first step, with an empty cache."""
        return self.compile_cold_s(config) or self.space.setup_s(config)

    def compile_cold_s(self, config: Config) -> float:
        """The longest compiling time seen among configs that compile alike, since later ones find much in the cache; 0 if none was seen."""
        if not (compiles := self.space.setting_up(config)):
            return 0.0
        measured = ((trial.config, trial.outcome.measurement) for trial in self._trials)
        alike = (m.compile_cold_s for other, m in measured if m and self.space.setting_up(other) == compiles)
        return max(alike, default=0.0)

    @property
    def shapes_recur(self) -> bool | None:
        """Whether training meets a few shapes of batches again and again, by the probe that has seen the most; None where none has seen
        several.
        """
        found = [m for _, outcome in self.evidence if (m := outcome.measurement) is not None and m.num_shapes > 1]
        return max(found, key=lambda measured: measured.num_shapes).shapes_recur if found else None

    def num_shapes(self, config: Config) -> float:
        """Different shapes that a whole training with such micro batches is expected to meet, as probes told that looked at more batches
        than they trained; 0 where none did.
        """
        group_of = self.space.techniques.drawing_group
        told = ((other, outcome.measurement) for other, outcome in self.evidence)
        looked = (
            found
            for other, found in told
            if found is not None and found.shape_growth is not None and found.shape_growth.bytes_per_shape
            if other.batch_size == config.batch_size and group_of(other) == group_of(config)
        )
        return max((found.num_shapes_expected for found in looked), default=0.0)

    def shape_growth(self, config: Config) -> ShapeGrowth | None:
        """What a training keeps for each new shape, as probes with such micro batches told; None where none did."""
        group_of = self.space.techniques.shapes_group
        return ShapeGrowth.typical(
            growth
            for other, outcome in self.evidence
            if (found := outcome.measurement) is not None and (growth := found.shape_growth) is not None
            if other.batch_size == config.batch_size and group_of(other) == group_of(config)
        )

    @property
    def largest_batch_size(self) -> float:
        """The largest micro batch that may be probed.

        It is the larger of the baseline's and the one that takes `longest_step_s` at the highest speed seen. Infinite where
        there is only one size, or nothing has run.
        """
        speeds = [outcome.measurement.samples_per_s for outcome in self.known.values() if outcome.measurement]
        if not speeds or len(self.space.choices[BATCH_SIZE]) == 1:
            return math.inf
        speed = max(speeds) / self.space.world.data_parallel  # of one process, as the micro batch is
        return max(self.space.baseline.batch_size, self.longest_step_s * speed)

    def _smallest_too_large(self) -> dict[Config, int]:
        """Config without its batch -> the smallest batch size that was too large; larger ones need at least as much memory."""
        smallest: dict[Config, int] = {}
        for config, outcome in (*self.known.items(), *self.failed_again.items()):
            if self._objective.does_not_fit(outcome):
                key = _without_batch(config)
                smallest[key] = min(config.batch_size, smallest.get(key, config.batch_size))
        return smallest

    def raised_by_batch(self) -> list[RaisedByBatch]:
        """The errors that the batch is to blame for.

        It takes the same error twice, once in a config of which everything but the batch has run with a smaller one.
        """
        raised: dict[str, list[tuple[Config, str]]] = {}
        for config, outcome in self.known.items():
            if outcome.kind is Kind.ERROR and not outcome.too_few_samples and not outcome.device_fault:
                raised.setdefault(without_digits(outcome.cause), []).append((config, outcome.cause))
        twice = [errors for errors in raised.values() if len(errors) > 1]
        if not twice:  # nearly always: this is asked for each proposal
            return []
        on = self.space.techniques.switched_on
        ran = [config for config, outcome in self.known.items() if outcome.ok]
        smallest: dict[tuple[str, Choice], int] = {}
        for config in ran:
            for choice in (_NOTHING, *on(config)):
                smallest[choice] = min(config.batch_size, smallest.get(choice, config.batch_size))
        found = []
        for errors in twice:
            shared = frozenset.intersection(*(frozenset(on(config)) for config, _ in errors))
            largest = max((config.batch_size for config in ran if shared <= set(on(config))), default=0)
            blamed = [
                (config.batch_size, cause)
                for config, cause in errors
                if all(smallest.get(choice, math.inf) < config.batch_size for choice in (_NOTHING, *on(config)))
            ]
            if beyond := [one for one in blamed if one[0] > largest]:
                size, cause = min(beyond)
                found.append(RaisedByBatch(cause=cause, size=size, largest=largest, choices=shared))
        return found

    def _barred_from(self, raised: RaisedByBatch) -> int:
        """The batch size from which none is probed: between what ran and what raised the middle one comes next."""
        between = sorted(int(s) for s in self.space.choices[BATCH_SIZE] if raised.largest < int(s) < raised.size)
        return [*between, raised.size][(len(between) + 1) // 2]

    def admissible(self) -> Callable[[Config], bool]:
        """Make a test whether a config may be probed: it is in the space, neither known nor running, not too slow to set up or to step, and
        no failure shows that it is too large, raises, hangs, is unsupported or needs more samples than there are.
        """
        on = self.space.techniques.switched_on
        known, too_large, hangs = self.known, self._smallest_too_large(), KnownHangs(self.known)
        # choices that cannot be applied together cannot be applied with further ones either, whatever the batch
        together = [set(on(c)) for c, outcome in known.items() if outcome.kind is Kind.UNSUPPORTED]
        unsupported = [choices for choices in together if choices]
        # workers may share out the samples, so further loader options cannot make them suffice
        too_few = [(c.batch_size, set(on(c, Phase.LOADER))) for c, outcome in known.items() if outcome.too_few_samples]
        fails_from = [*too_few, *((self._barred_from(one), one.choices) for one in self.raised_by_batch())]
        largest, setup_left_s = self.largest_batch_size, self._setup_left_s(self)
        in_flight = self.in_flight

        def cannot_be(config: Config) -> bool:
            if not unsupported and not fails_from:
                return False
            choices = set(on(config))
            return any(combined <= choices for combined in unsupported) or any(
                size <= config.batch_size and how <= choices for size, how in fails_from
            )

        def may_be_probed(config: Config) -> bool:
            return (
                config not in known
                and config not in in_flight
                and config.batch_size <= largest
                and not (too_large and config.batch_size >= too_large.get(_without_batch(config), math.inf))
                and not hangs.rules_out(config)
                and not cannot_be(config)
                and (config == self.space.baseline or self.setup_s(config) <= max(0.0, setup_left_s))
                and self.space.contains(config)
            )

        return may_be_probed


def feasible_each_time(trials: Iterable[Trial]) -> dict[Config, Sequence[Trial]]:
    """For each config that was feasible in every trial that counts, these trials in order.

    The trials that count are the last one of the search and the play-off's trials after it, without excused time-outs.
    Earlier trials failed, or the config would not have been probed again.
    """
    found = list(trials)
    left_out = find_excused(found)
    by_config = group_by_config(trial for trial in found if trial.number not in left_out)
    counted = {config: _since_last_search(found) for config, found in by_config.items()}
    return {config: found for config, found in counted.items() if all(trial.feasible for trial in found)}


def _without_batch(config: Config) -> Config:
    return config.replace(batch_size=1, accumulation_steps=1)


def _since_last_search(trials: Sequence[Trial]) -> Sequence[Trial]:
    searched = [place for place, trial in enumerate(trials) if not trial.in_play_off]
    return trials[searched[-1] :] if searched else trials


def what_stands(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that stands for a config that was probed several times: the last certain one, else the last.

    A measurement is certain, and so is running out of memory, since the limit stays the same, unless others held the memory. A
    measurement that was disturbed stands only where none was not.
    """
    certain = [outcome for outcome in outcomes if _is_certain(outcome)]
    calm = [outcome for outcome in certain if not outcome.disturbances]
    return (calm or certain or outcomes)[-1]


def _is_certain(outcome: Outcome) -> bool:
    return outcome.kind is Kind.OK or (outcome.kind is Kind.OOM and not outcome.crowded)


def retryable(
    trials: Sequence[Trial],
    baselines: Collection[Config],
    timeout_s: Callable[[Outcome | None], float],
    objective: Objective,
) -> frozenset[int]:
    """The numbers of the trials whose failure is retryable.

    A crash or an error gets a second try; after that the config is to blame. A probe that failed because others held the
    memory is tried again. So is one that was killed sooner than it would be now, unless the steps it took show that its config
    is slower than the fastest. A baseline that failed for any reason but memory is always tried again, because no gain is
    known without it. In the play-off only a failure for lack of memory is final.

    Args:
        trials: the trials of earlier searches.
        baselines: the baseline now and those of earlier searches.
        timeout_s: returns the time-out of a probe now, given the baseline's outcome.
    """
    by_config = group_by_config(trial for trial in trials if not trial.in_play_off)
    outcomes = {config: [trial.outcome for trial in found] for config, found in by_config.items()}
    stands = {config: what_stands(found) for config, found in outcomes.items()}
    measured = [outcome for config, outcome in stands.items() if config in baselines and outcome.ok]
    patience_s = timeout_s(measured[-1] if measured else None)
    speeds = (t.outcome.measurement.samples_per_s for t in trials if t.feasible and t.outcome.measurement)
    fastest = max(speeds, default=0.0)
    again = {
        trial.number
        for trial in trials
        if trial.in_play_off and not trial.feasible and not objective.does_not_fit(trial.outcome)
    }
    for config, found in by_config.items():
        is_uncertain = not _is_certain(stands[config])
        if is_uncertain and (config in baselines or _may_pass(outcomes[config], patience_s, fastest)):
            again |= {trial.number for trial in found}
    return frozenset(again)


def group_by_config(trials: Iterable[Trial]) -> dict[Config, list[Trial]]:
    """The trials of each config, in order."""
    found: dict[Config, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.config, []).append(trial)
    return found


def _may_pass(outcomes: Sequence[Outcome], timeout_s: float, fastest: float) -> bool:
    stands = what_stands(outcomes)
    if stands.kind is Kind.TIMEOUT:
        too_slow = stands.samples_per_s_high is not None and stands.samples_per_s_high < fastest
        return not too_slow and stands.wall_s < PATIENT * timeout_s
    if stands.crowded:
        return True
    return stands.kind in PASSING and sum(outcome.kind in PASSING for outcome in outcomes) == 1


def find_excused(trials: Sequence[Trial]) -> frozenset[int]:
    """The numbers of the play-off's time-outs that say nothing against their configs.

    A config that once ran to its end in the play-off, and is later ended for taking several times as long, is judged by the
    others. Where none of them ran to its end in that round, the machine stood still. Otherwise this process alone may have
    stood still: a first time-out is excused, a second one in succession is the config's own.

    Args:
        trials: trials in the order in which they ended; those outside the play-off do not matter.
    """
    played = [trial for trial in trials if trial.in_play_off]
    completed = {trial.round for trial in played if trial.feasible}
    ran: set[Config] = set()
    late: set[Config] = set()
    found = set()
    for trial in played:
        if trial.feasible:
            ran.add(trial.config)
            late.discard(trial.config)
        elif trial.outcome.kind is Kind.TIMEOUT and trial.config in ran:
            if trial.round not in completed:
                found.add(trial.number)
            elif trial.config not in late:
                found.add(trial.number)
                late.add(trial.config)
    return frozenset(found)


class KnownHangs:
    """Rules out configs after time-outs. Those choices of a timed-out config that no other config has run are blamed together.

    A config with all of the blamed choices is ruled out. A time-out whose bound does not show that its config is slower
    than the fastest came too soon to blame anything. After a time-out, choices that have not run yet are tried one at a time, so
    that none is blamed for another. As long as nothing has run, nothing is ruled out.
    """

    def __init__(self, known: Mapping[Config, Outcome]) -> None:
        self._ran = {choice for config, outcome in known.items() if outcome.ok for choice in config.choices}
        fastest = max((o.measurement.samples_per_s for o in known.values() if o.measurement), default=0.0)
        hung = [
            self._new(config)
            for config, outcome in known.items()
            if outcome.kind is Kind.TIMEOUT
            and (outcome.samples_per_s_high is None or outcome.samples_per_s_high < fastest)
        ]
        self._hung = hung if self._ran else []

    def rules_out(self, config: Config) -> bool:
        """Whether the config should not be probed."""
        new = self._new(config)
        return bool(self._hung) and (len(new) > 1 or any(blamed and blamed <= new for blamed in self._hung))

    def _new(self, config: Config) -> set[tuple[str, Choice]]:
        return {choice for choice in config.choices if choice not in self._ran and choice[0] not in BATCH_KEYS}
