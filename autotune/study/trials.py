"""Trials as Optuna keeps them: the distributions of their parameters, and the records that are read from them."""

from __future__ import annotations

from collections.abc import Iterable

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune.records.config import Config
from autotune.records.study import BegunTrial, EndedTrial, Trial
from autotune.space import Space


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """A space in Optuna's terms: a distribution for each key with several choices to search.

    The distributions cover every supported choice, also those left out of this search, because Optuna does not let a
    categorical distribution change within a study.
    """
    found: dict[str, BaseDistribution] = {}
    for name, choices in space.supported.items():
        if name in space.ordered:
            low, high = int(choices[0]), int(choices[-1])
            found[name] = IntDistribution(low, high, log=low > 0)
        else:
            found[name] = CategoricalDistribution(choices)
    return found


def trials_of(trials: Iterable[FrozenTrial], known: dict[int, Trial] | None = None) -> list[Trial]:
    """The records of the trials that are finished, in the order in which they were begun.

    Args:
        known: records by the trial's id, which are not read again; new ones are added.
    """
    records = {} if known is None else known
    finished = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    for trial in finished:
        if trial._trial_id not in records:
            records[trial._trial_id] = trial_of(trial)
    return sorted((records[trial._trial_id] for trial in finished), key=lambda trial: trial.number)


def trial_of(trial: FrozenTrial) -> Trial:
    """The record of a finished Optuna trial that `Store` wrote."""
    begun, ended = BegunTrial.from_dict(trial.user_attrs), EndedTrial.from_dict(trial.user_attrs)
    assert trial.value is not None  # every finished trial has one
    return Trial(
        number=number_of(trial, begun),
        stage=begun.stage,
        config=Config(tuple(begun.config.items())),
        reason=begun.reason,
        prediction=begun.prediction,
        round=begun.round,
        outcome=ended.outcome,
        feasible=ended.feasible,
        score=trial.value,
        disturbed=ended.disturbed,
        started=trial.datetime_start,
    )


def number_of(trial: FrozenTrial, begun: BegunTrial) -> int:
    """The trial's number, counted over search and play-off together."""
    return trial.number if begun.number is None else begun.number
