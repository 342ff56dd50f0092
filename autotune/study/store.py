"""The study in Optuna's storage: one Optuna trial per probe, so nothing is lost and nothing is measured twice.

The play-off measures again what the search found. Its trials are in a study of their own, so that `best_trial`, plots and
samplers of Optuna see each config of the search once.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import get_storage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import StudyError, first_line
from autotune.records.config import Config
from autotune.records.device import same_memory
from autotune.records.formats import require_readable
from autotune.records.objective import OBJECTIVES, Objective
from autotune.records.outcome import Outcome
from autotune.records.prediction import Prediction
from autotune.records.trial import PLAY_OFF, Proposal, Trial
from autotune.space import Space
from autotune.study.distributions import distributions_of
from autotune.study.place import PLAY_OFF_OF, Place
from autotune.units import format_bytes

# 1 called a prediction a forecast; up to 2 the play-off was in the search's study, and what was not feasible had the worst
# feasible value. Both open.
FORMAT = 3
MEMORIES = {"memory_limit_bytes": "memory limit", "total_bytes": "memory of the device"}  # of a fingerprint, in words
SEARCHED_AT = "searched_at"  # attribute: when the last search began, in UTC
NO_ANSWER = "no_answer"  # attribute: why the last search found none; empty where it did, or did not end


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


@contextlib.contextmanager
def _opening(place: Place) -> Iterator[None]:
    try:
        yield
    except StudyError:
        raise
    except Exception as error:  # SQLAlchemy's many, a driver that is missing, a file that is no database
        raise StudyError(
            f"the storage {place.storage} cannot be opened: {_cause(error)}; "
            "expected a database file that nothing else locks, or a URL such as sqlite:///studies/gpt.db"
        ) from None


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
        self._running: dict[int, tuple[optuna.Study, optuna.Trial]] = {}
        self._objective = OBJECTIVES.get(str(attributes.get("objective")))
        with _opening(place):
            self._storage = get_storage(place.storage)
            self._study = self._opened(place.study, "fingerprint")
            names = optuna.get_all_study_names(self._storage)
            self._play_off = self._opened(place.play_off, PLAY_OFF_OF) if place.play_off in names else None
        if known := self._study.user_attrs.get("fingerprint"):
            found = self._study.user_attrs.get("format", 1)
            require_readable(f"the study {place.study} in {place.storage}", found, FORMAT)
            _require_equal(place, known, dict(fingerprint))
        now = datetime.now(UTC).isoformat()
        facts = {"format": FORMAT, "fingerprint": dict(fingerprint), NO_ANSWER: "", SEARCHED_AT: now}
        for key, value in {**facts, **attributes}.items():
            self._study.set_user_attr(key, value)
        for study in filter(None, (self._study, self._play_off)):
            _close_what_a_dead_search_left(study)
        self._next_number = 1 + max((trial.number for trial in self.trials()), default=-1)  # lost ones are not shown

    def _opened(self, name: str, mark: str) -> optuna.Study:
        """The study of that name, made if there is none. `mark` is an attribute by which ours are known."""
        study = optuna.create_study(storage=self._storage, study_name=name, direction="maximize", load_if_exists=True)
        if mark not in study.user_attrs and study.trials:
            raise StudyError(
                f"the study {name} in {self.place.storage} was not made by autotune; use another with --study"
            )
        if self._objective is not None and study.metric_names is None:
            study.set_metric_names([self._objective.score_name()])
        return study

    def _kept(self) -> list[FrozenTrial]:
        """The trials of both studies."""
        studies = filter(None, (self._study, self._play_off))
        return [trial for study in studies for trial in study.get_trials(deepcopy=False)]

    def _study_of(self, stage: str) -> optuna.Study:
        """The study that keeps the trials of a stage; the play-off's is made when it begins."""
        if stage != PLAY_OFF:
            return self._study
        if self._play_off is None:
            self._play_off = self._opened(self.place.play_off, PLAY_OFF_OF)
            self._play_off.set_user_attr(PLAY_OFF_OF, self.place.study)
        return self._play_off

    def attributes(self) -> dict[str, Any]:
        """The study's own attributes."""
        return dict(self._study.user_attrs)

    def set_attribute(self, key: str, value: Any) -> None:
        """Keep a JSON-ready fact with the study."""
        self._study.set_user_attr(key, value)

    def trials(self) -> list[Trial]:
        """Every finished trial, in order."""
        return trials_of(self._kept())

    def begin(self, proposal: Proposal, prediction: Prediction | None, space: Space) -> int:
        """Open a trial for a proposal and record it before it runs, so that a search that dies leaves evidence.

        Returns:
            The trial's number, which `finish` and `fail` take. The play-off's go on counting where the search's end.
        """
        number, self._next_number = self._next_number, self._next_number + 1
        described: dict[str, Any] = {
            "number": number,
            "config": proposal.config.as_dict(),
            "stage": proposal.stage,
            "reason": proposal.reason or (prediction.reason if prediction else ""),
            "prediction": prediction.to_dict() if prediction else None,
        }
        if proposal.round is not None:
            described["round"] = proposal.round
        study = self._study_of(proposal.stage)
        opened = create_trial(
            state=TrialState.RUNNING,
            params=space.params(proposal.config),
            distributions=distributions_of(space),
            user_attrs=described,
        )
        # one commit, where `ask` takes one for each parameter: a disk takes 20 ms for each
        trial_id = self._storage.create_new_trial(self._storage.get_study_id_from_name(study.study_name), opened)
        self._running[number] = study, optuna.Trial(study, trial_id)
        return number

    def finish(self, number: int, outcome: Outcome, objective: Objective, *, disturbed: bool) -> Trial:
        """Record an outcome. An infeasible one is COMPLETE with a constraint and the value of what does not train at all.

        Samplers do not see failed trials, and would propose the same config again.
        """
        study, trial = self._running.pop(number)
        infeasibility = objective.infeasibility(outcome)
        feasible = infeasibility <= 0
        score = objective.score(outcome) if feasible else objective.worst()
        trial.set_constraint("infeasibility", infeasibility)
        ended = "over the limit" if outcome.ok and not feasible else str(outcome.kind)
        facts = {"ended": ended, "score": score, "feasible": feasible, "disturbed": disturbed}
        if outcome.measurement is not None:
            facts["peak_bytes"] = outcome.measurement.peak_bytes
        for key, value in facts.items():
            trial.set_user_attr(key, value)
        trial.set_user_attr("outcome", outcome.to_dict())  # last: with it the trial is finished, told or not
        return trial_of(study.tell(trial, score))

    def fail(self, number: int, reason: str) -> None:
        """Close a trial that the user or a fault of the machine cut short."""
        study, trial = self._running.pop(number)
        trial.set_user_attr("fault", reason)
        study.tell(trial, state=TrialState.FAIL)


def _close_what_a_dead_search_left(study: optuna.Study) -> None:
    """Heartbeats do not work with ask and tell; the lock says that nobody runs these trials."""
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        if "outcome" in trial.user_attrs:  # measured, and not yet told
            study.tell(trial.number, trial.user_attrs["score"])
        else:
            study.tell(trial.number, state=TrialState.FAIL)


def trials_of(trials: Iterable[FrozenTrial]) -> list[Trial]:
    """The records of the trials that are finished, in the order in which they were begun."""
    finished = (trial_of(trial) for trial in trials if trial.state is TrialState.COMPLETE)
    return sorted(finished, key=lambda trial: trial.number)


def trial_of(trial: FrozenTrial) -> Trial:
    """The record of a finished Optuna trial that `Store` wrote."""
    attributes = trial.user_attrs
    predicted = attributes.get("prediction") or attributes.get("forecast")  # its name in studies of format 1
    assert trial.value is not None  # every finished trial has one
    return Trial(
        number=_number(trial),
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


def _number(trial: FrozenTrial) -> int:
    """One count over search and play-off; up to format 2 they were one study."""
    number: int = trial.user_attrs.get("number", trial.number)
    return number


def stored_attributes(place: Place) -> dict[str, Any]:
    """The attributes of an existing study; empty if there is none.

    Raises:
        StudyError: the storage cannot be opened. That is found here, before anything takes seconds.
    """
    if place.file is not None and not place.file.exists():
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with _opening(place), contextlib.suppress(KeyError):  # no such study
        return dict(optuna.load_study(study_name=place.study, storage=place.storage).user_attrs)
    return {}


def _cause(error: BaseException) -> str:
    """The first line of the database's own message; Optuna's message around it speaks of invalid data."""
    while isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    return first_line(getattr(error, "orig", None) or error)


def require_comparable(place: Place, stored: Mapping[str, Any], **wanted: Any) -> None:
    """Refuse a study that cannot be resumed, by what of its fingerprint is known before anything takes seconds.

    Args:
        stored: the study's attributes.

    Raises:
        StudyError: it has other values.
    """
    known = stored.get("fingerprint", {})
    _require_equal(
        place, {key: known[key] for key in wanted if key in known}, {k: wanted[k] for k in wanted if k in known}
    )


def _require_equal(place: Place, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = []
    for key in sorted({*known, *wanted}):
        if key == "total_bytes" and same_memory(known.get(key, 0), wanted.get(key, 0)):
            continue
        if known.get(key) != wanted.get(key):
            was, now = _shown(known, key), _shown(wanted, key)
            if was == now:  # a few bytes apart
                was, now = f"{known[key]} bytes", f"{wanted[key]} bytes"
            differences.append(f"{MEMORIES.get(key, key)} was {was} and is {now}")
    if differences:
        raise StudyError(
            f"the study {place.study} in {place.storage} cannot be resumed, because new measurements would not be comparable with it: "
            f"{'; '.join(differences)}. Start another with --study NAME, or move the file away"
        )


def _shown(fingerprint: Mapping[str, Any], key: str) -> str:
    if key not in fingerprint:
        return "not recorded"  # by another version
    value = fingerprint[key]
    return format_bytes(value) if key in MEMORIES else repr(value)
