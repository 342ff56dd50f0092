"""The study in Optuna's storage: one Optuna trial per probe, so nothing is lost and nothing is measured twice."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import StudyError
from autotune.records.config import Config
from autotune.records.formats import require_readable
from autotune.records.objective import Objective
from autotune.records.outcome import Outcome
from autotune.records.prediction import Prediction
from autotune.records.trial import Proposal, Trial
from autotune.space import Space
from autotune.study.distributions import distributions_of
from autotune.study.place import Place

FORMAT = 2  # 1 called a prediction a forecast, and opens


@contextlib.contextmanager
def storage_errors(place: Place) -> Iterator[None]:
    """Explain a failure of the storage while a study is in use: a lock, a full disk, a server that is gone.

    Raises:
        StudyError: in place of the storage's own exception.
    """
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        raise StudyError(
            f"the study {place.study} in {place.storage} can no longer be read or written: {_cause(error)}; "
            "check that its disk has room and that nothing else locks it, then run the same command again: it continues where it stopped"
        ) from error


class Store:
    """A study opened for writing.

    Args:
        fingerprint: the facts that must be equal for measurements to be comparable: task, device, versions, limits.
        attributes: further facts about the search, for readers of the study.

    Raises:
        StudyError: the storage cannot be opened, is not a study, or has another fingerprint.
    """

    def __init__(self, place: Place, fingerprint: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        warnings.filterwarnings("ignore", category=ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.place = place
        self._running: dict[int, optuna.Trial] = {}
        try:
            self._study = optuna.create_study(
                storage=place.storage, study_name=place.study, direction="maximize", load_if_exists=True
            )
        except Exception as error:  # SQLAlchemy's many, a driver that is missing, a file that is no database
            raise StudyError(
                f"the storage {place.storage} cannot be opened: {_cause(error)}; "
                "expected a database file that nothing else locks, or a URL such as sqlite:///studies/gpt.db"
            ) from None
        known = self._study.user_attrs.get("fingerprint")
        if known is None and self._study.trials:
            raise StudyError(
                f"the study {place.study} in {place.storage} was not made by autotune; use another with --study"
            )
        if known is not None:
            found = self._study.user_attrs.get("format", 1)
            require_readable(f"the study {place.study} in {place.storage}", found, FORMAT)
            _require_equal(place, known, dict(fingerprint))
        for key, value in {"format": FORMAT, "fingerprint": dict(fingerprint), **attributes}.items():
            self._study.set_user_attr(key, value)
        self._close_what_a_dead_search_left()

    def _close_what_a_dead_search_left(self) -> None:
        """Heartbeats do not work with ask and tell; the lock says that nobody runs these trials."""
        for trial in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING, TrialState.WAITING]):
            if trial.state is TrialState.WAITING:
                self._study.ask()
            if "outcome" in trial.user_attrs:  # measured, and not yet told
                self._study.tell(trial.number, trial.user_attrs["score"])
            else:
                self._study.tell(trial.number, state=TrialState.FAIL)

    def attributes(self) -> dict[str, Any]:
        """The study's own attributes."""
        return dict(self._study.user_attrs)

    def set_attribute(self, key: str, value: Any) -> None:
        """Keep a JSON-ready fact with the study."""
        self._study.set_user_attr(key, value)

    def trials(self) -> list[Trial]:
        """Every finished trial, in order."""
        finished = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        return [trial_of(trial) for trial in finished]

    def begin(self, proposal: Proposal, prediction: Prediction | None, space: Space) -> int:
        """Open a trial for a proposal and record it before it runs, so that a search that dies leaves evidence.

        Returns:
            The trial's number, which `finish` and `fail` take.
        """
        described: dict[str, Any] = {
            "config": proposal.config.as_dict(),
            "stage": proposal.stage,
            "reason": proposal.reason or (prediction.reason if prediction else ""),
            "prediction": prediction.to_dict() if prediction else None,
        }
        if proposal.round is not None:
            described["round"] = proposal.round
        self._study.enqueue_trial(
            space.params(proposal.config), user_attrs=described
        )  # one commit: a disk takes 20 ms for each
        trial = self._study.ask(distributions_of(space))
        self._running[trial.number] = trial
        return trial.number

    def finish(self, number: int, outcome: Outcome, objective: Objective, *, worst: float, disturbed: bool) -> Trial:
        """Record an outcome. An infeasible one is COMPLETE with the worst value and a constraint.

        Samplers do not see failed trials, and would propose the same config again.
        """
        trial = self._running.pop(number)
        infeasibility = objective.infeasibility(outcome)
        score = objective.score(outcome) if outcome.ok else worst
        trial.set_constraint("infeasibility", infeasibility)
        for key, value in {"score": score, "feasible": infeasibility <= 0, "disturbed": disturbed}.items():
            trial.set_user_attr(key, value)
        trial.set_user_attr("outcome", outcome.to_dict())  # last: with it the trial is finished, told or not
        return trial_of(self._study.tell(trial, score))

    def fail(self, number: int, reason: str) -> None:
        """Close a trial that the user or a fault of the machine cut short."""
        trial = self._running.pop(number)
        trial.set_user_attr("fault", reason)
        self._study.tell(trial, state=TrialState.FAIL)


def trial_of(trial: FrozenTrial) -> Trial:
    """The record of a finished Optuna trial that `Store` wrote."""
    attributes = trial.user_attrs
    predicted = attributes.get("prediction") or attributes.get("forecast")  # its name in studies of format 1
    assert trial.value is not None  # every finished trial has one
    return Trial(
        number=trial.number,
        stage=attributes["stage"],
        config=Config(tuple(attributes["config"].items())),
        reason=attributes["reason"],
        prediction=Prediction.from_dict(predicted) if predicted else None,
        round=attributes.get("round"),
        outcome=Outcome.from_dict(attributes["outcome"]),
        feasible=attributes["feasible"],
        score=trial.value,
        disturbed=attributes.get("disturbed", False),
        started=trial.datetime_start,
    )


def stored_attributes(place: Place) -> dict[str, Any]:
    """The attributes of an existing study; empty if there is none or it cannot be read."""
    if place.file is not None and not place.file.exists():
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with contextlib.suppress(Exception):  # no such study, no database: `Store` says what is wrong
        return dict(optuna.load_study(study_name=place.study, storage=place.storage).user_attrs)
    return {}


def _cause(error: BaseException) -> str:
    """The first line of the database's own message; Optuna's message around it speaks of invalid data."""
    while isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    said = str(getattr(error, "orig", None) or error)
    return said.splitlines()[0] if said else type(error).__name__


def _require_equal(place: Place, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = [
        f"{key} was {_shown(known, key)} and is {_shown(wanted, key)}"
        for key in sorted({*known, *wanted})
        if known.get(key) != wanted.get(key)
    ]
    if differences:
        raise StudyError(
            f"the study {place.study} in {place.storage} cannot be resumed, because new measurements would not be comparable with it: "
            f"{'; '.join(differences)}. Start another with --study NAME, or move the file away"
        )


def _shown(fingerprint: Mapping[str, Any], key: str) -> str:
    return repr(fingerprint[key]) if key in fingerprint else "not recorded"  # by another version
