"""Retryable failures: which failures of an earlier search are tried again when it is resumed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from autotune.records.config import Config
from autotune.records.objective import Objective
from autotune.records.outcome import Kind, Outcome
from autotune.records.trial import Trial

PATIENT = 0.9  # share of a time-out after which a probe is taken to have had all of it
PASSING = (Kind.CRASHED, Kind.ERROR)  # may have been the machine's fault: a full disk, another program


def what_stands(outcomes: Sequence[Outcome]) -> Outcome:
    """The valid outcome of a config that was probed several times: the last certain one, else the last.

    A measurement or an out-of-memory stays valid, since the limit is the same.
    """
    certain = [outcome for outcome in outcomes if outcome.kind in (Kind.OK, Kind.OOM)]
    return (certain or outcomes)[-1]


def retryable(
    trials: Sequence[Trial],
    baselines: Collection[Config],
    timeout_s: Callable[[Outcome | None], float],
    objective: Objective,
) -> frozenset[int]:
    """The numbers of the trials whose failure is retryable.

    A crash or an error gets a second try; after that the config is to blame. A probe that was killed sooner than it
    would be now gets today's time-out. A baseline that failed for any reason but memory is always tried again, because
    there is no gain without it. In the play-off only a failure for lack of memory is final.

    Args:
        trials: the trials of earlier searches.
        baselines: the baseline now and those of earlier searches.
        timeout_s: returns the time-out of a probe now, given the baseline's outcome.
    """
    by_config: dict[Config, list[Trial]] = {}
    for trial in trials:
        if not trial.in_play_off:
            by_config.setdefault(trial.config, []).append(trial)
    again = {
        trial.number
        for trial in trials
        if trial.in_play_off and not trial.feasible and not objective.does_not_fit(trial.outcome)
    }
    known_baselines = [config for config in by_config if config in baselines]
    measured: Outcome | None = None
    for config in known_baselines:
        stands = what_stands([trial.outcome for trial in by_config[config]])
        if stands.ok:
            measured = stands
        if stands.kind not in (Kind.OK, Kind.OOM):
            again |= {trial.number for trial in by_config[config]}
    patience_s = timeout_s(measured)
    for config, found in by_config.items():
        if config not in baselines and _may_pass([trial.outcome for trial in found], patience_s):
            again |= {trial.number for trial in found}
    return frozenset(again)


def _may_pass(outcomes: Sequence[Outcome], timeout_s: float) -> bool:
    stands = what_stands(outcomes)
    if stands.kind is Kind.TIMEOUT:
        return stands.wall_s < PATIENT * timeout_s
    return stands.kind in PASSING and sum(outcome.kind in PASSING for outcome in outcomes) == 1
