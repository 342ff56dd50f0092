"""What follows from a failure: nothing where the machine stood still, another try, or that configs like it are left alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from autotune.records.config import BATCH_KEYS, Choice, Config
from autotune.records.objective import Objective
from autotune.records.outcome import Kind, Outcome
from autotune.records.study import Trial

PATIENT = 0.9  # share of a time-out after which a probe is taken to have had all of it
PASSING = (Kind.CRASHED, Kind.ERROR)  # may have been the machine's fault: a full disk, another program


def what_stands(outcomes: Sequence[Outcome]) -> Outcome:
    """The valid outcome of a config that was probed several times: the last certain one, else the last.

    A measurement or an out-of-memory stays valid, since the limit is the same.
    """
    return ([outcome for outcome in outcomes if _is_certain(outcome)] or outcomes)[-1]


def _is_certain(outcome: Outcome) -> bool:
    return outcome.kind is Kind.OK or (outcome.kind is Kind.OOM and not outcome.crowded)


def retryable(
    trials: Sequence[Trial],
    baselines: Collection[Config],
    timeout_s: Callable[[Outcome | None], float],
    objective: Objective,
) -> frozenset[int]:
    """The numbers of the trials whose failure is retryable.

    A crash or an error gets a second try; after that the config is to blame. What failed because others held the memory
    is tried again. A probe that was killed sooner than it would be now gets today's time-out, unless what it did shows
    that its config is slower than the fastest. A baseline that failed for any reason but memory is always tried again,
    because there is no gain without it. In the play-off only a failure for lack of memory is final.

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

    A config that has run through in the play-off, and is then ended for taking several times as long, is judged by what
    the others do. Where nobody runs through in that round, the machine stood still. Otherwise it may have done so for
    this process alone: the first time-out is excused, a second one in turn is the config's own.

    Args:
        trials: in the order in which they ended; those outside the play-off do not matter.
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
    """Which configs a time-out rules out: those with all of its choices that have not run in any other config.

    A probe whose bound does not show that its config is slower than the fastest was ended too soon to rule anything out.
    After a time-out the choices of techniques that have not run yet are tried one at a time, so that none is blamed for
    another. As long as nothing runs, nothing is ruled out.
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
        """Whether to leave the config alone."""
        new = self._new(config)
        return bool(self._hung) and (len(new) > 1 or any(blamed and blamed <= new for blamed in self._hung))

    def _new(self, config: Config) -> set[tuple[str, Choice]]:
        return {choice for choice in config.choices if choice not in self._ran and choice[0] not in BATCH_KEYS}
