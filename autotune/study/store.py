"""The study in Optuna's storage: one Optuna trial per probe, so nothing is lost and nothing is measured twice.

The play-off measures the search's best configs again. Its trials are in a separate study, so that Optuna's `best_trial`, plots
and samplers see each config of the search once.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage, get_storage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import StudyError, first_line
from autotune.records.config import Config
from autotune.records.formats import require_readable
from autotune.records.objective import OBJECTIVES, Objective
from autotune.records.outcome import Outcome
from autotune.records.recheck import Recheck
from autotune.records.study import (
    PLAY_OFF,
    BegunTrial,
    EndedTrial,
    Prediction,
    Proposal,
    SearchFacts,
    StudyFacts,
    Trial,
)
from autotune.space import Space
from autotune.study.place import BEAT_S, PLAY_OFF_OF, Place, is_gone, require_equal, this_process

# Format 1 called a prediction a forecast; up to format 2 the play-off was in the search's study, and an infeasible trial had the
# worst feasible value. Both can be opened.
FORMAT = 3


def connect(url: str, **options: Any) -> RDBStorage:
    """Optuna's storage in a database."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return RDBStorage(url, **options)


@contextlib.contextmanager
def opening_errors(storage: str, cannot: str, expected: str) -> Iterator[None]:
    """Explain why a storage cannot be opened.

    Args:
        storage: the storage as the user gave it.
        cannot: what cannot be done with it, as a participle: `opened`, `read`.
        expected: what a storage looks like.

    Raises:
        StudyError: in place of any other exception.
    """
    try:
        yield
    except StudyError:
        raise
    except Exception as error:  # one of SQLAlchemy's many, a missing driver, a file that is no database
        raise StudyError(f"the storage {storage} cannot be {cannot}: {_cause(error)}; expected {expected}") from None


def _opening(place: Place) -> contextlib.AbstractContextManager[None]:
    expected = "a database file that nothing else locks, or a URL such as sqlite:///studies/gpt.db"
    return opening_errors(place.storage, "opened", expected)


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
        facts: what the search says of itself; its fingerprint must be the study's.

    Raises:
        StudyError: the storage cannot be opened, is not a study, or has another fingerprint.
    """

    def __init__(self, place: Place, facts: SearchFacts) -> None:
        warnings.filterwarnings("ignore", category=ExperimentalWarning)
        self.place = place
        self._running: dict[int, tuple[optuna.Study, optuna.Trial]] = {}
        self._objective = OBJECTIVES[facts.objective]
        with _opening(place):
            self._storage = get_storage(connect(place.storage))
            self._study = self._open(place.study, "fingerprint")
            names = optuna.get_all_study_names(self._storage)
            self._play_off = self._open(place.play_off, PLAY_OFF_OF) if place.play_off in names else None
        known = self.facts
        if "fingerprint" in self._study.user_attrs:
            require_equal(place, known.fingerprint, facts.fingerprint)
        now = datetime.now(UTC).isoformat()
        self._write(known, {**vars(facts), "format": FORMAT, "no_answer": "", "searched_at": now})
        for study in filter(None, (self._study, self._play_off)):
            _close_what_a_dead_search_left(study)
        shown = [trial for trial in self._kept() if trial.state is not TrialState.FAIL]
        numbers = (_number(trial, BegunTrial.from_dict(trial.user_attrs)) for trial in shown)
        self._next_number = 1 + max(numbers, default=-1)
        self._beaten_s = time.monotonic()

    def _open(self, name: str, mark: str) -> optuna.Study:
        """The study of that name, created if there is none. Our studies are recognized by the attribute `mark`."""
        study = optuna.create_study(storage=self._storage, study_name=name, direction="maximize", load_if_exists=True)
        if mark not in study.user_attrs and study.trials:
            raise StudyError(
                f"the study {name} in {self.place.storage} was not made by autotune; use another with --study"
            )
        if study.metric_names is None:
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
            self._play_off = self._open(self.place.play_off, PLAY_OFF_OF)
            self._play_off.set_user_attr(PLAY_OFF_OF, self.place.study)
        return self._play_off

    @property
    def facts(self) -> StudyFacts:
        """What the study keeps beside its trials."""
        return facts_of(f"{self.place.study} in {self.place.storage}", self._study.user_attrs)

    def keep(self, **changed: Any) -> None:
        """Keep what has changed of the study's facts: fields of `StudyFacts`. Raises TypeError for another name."""
        self._write(self.facts, changed)

    def _write(self, known: StudyFacts, changed: Mapping[str, Any]) -> None:
        before, after = known.to_dict(), replace(known, **changed).to_dict()
        for name in changed:
            if after[name] != before[name]:
                self._study.set_user_attr(name, after[name])

    def trials(self) -> list[Trial]:
        """Every finished trial, in order."""
        return trials_of(self._kept())

    def begin(self, proposal: Proposal, prediction: Prediction | None, space: Space) -> int:
        """Open a trial for a proposal and record it before it runs, so that a search that dies leaves evidence.

        Returns:
            The trial's number, which `finish` and `fail` take. It counts over search and play-off together.
        """
        number, self._next_number = self._next_number, self._next_number + 1
        begun = BegunTrial(
            number=number,
            config=proposal.config.as_dict(),
            stage=proposal.stage,
            reason=proposal.reason or (prediction.reason if prediction else ""),
            prediction=prediction,
            round=proposal.round,
            owner=this_process(),
            seen_at_s=time.time(),
        )
        study = self._study_of(proposal.stage)
        opened = create_trial(
            state=TrialState.RUNNING,
            params=space.params(proposal.config),
            distributions=distributions_of(space),
            user_attrs=begun.to_dict(),
        )
        # a single commit, which takes a disk 20 ms; `ask` makes one for each parameter
        trial_id = self._storage.create_new_trial(self._storage.get_study_id_from_name(study.study_name), opened)
        self._running[number] = study, optuna.Trial(study, trial_id)
        return number

    def beat(self) -> None:
        """Record that the controller of the running trials is alive. May be called often: it writes only every `BEAT_S` seconds."""
        now_s = time.monotonic()
        if now_s - self._beaten_s > BEAT_S:
            self._beaten_s = now_s
            for _, trial in self._running.values():
                trial.set_user_attr("seen_at_s", time.time())

    def finish(self, number: int, outcome: Outcome, objective: Objective, *, disturbed: bool) -> Trial:
        """Record an outcome. An infeasible trial, too, becomes COMPLETE, with a constraint and the objective's worst score.

        Samplers do not see trials marked as failed, and would propose the same config again.
        """
        study, trial = self._running.pop(number)
        infeasibility = objective.infeasibility(outcome)
        feasible = infeasibility <= 0
        score = objective.score(outcome) if feasible else objective.worst()
        trial.set_constraint("infeasibility", infeasibility)
        ended = EndedTrial(
            ended="over the limit" if outcome.ok and not feasible else str(outcome.kind),
            score=score,
            feasible=feasible,
            disturbed=disturbed,
            peak_bytes=outcome.measurement.peak_bytes if outcome.measurement else None,
            outcome=outcome,
        )
        for key, value in ended.to_dict().items():
            trial.set_user_attr(key, value)
        return trial_of(study.tell(trial, score))

    def fail(self, number: int, reason: str) -> None:
        """Close a trial that the user or a fault of the machine cut short."""
        study, trial = self._running.pop(number)
        trial.set_user_attr("fault", reason)
        study.tell(trial, state=TrialState.FAIL)


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


def _close_what_a_dead_search_left(study: optuna.Study) -> None:
    """Close the trials whose controller is gone. Optuna's own heartbeats do not work with ask and tell, nor look at processes."""
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        if not is_gone(BegunTrial.from_dict(trial.user_attrs)):
            continue
        if "outcome" in trial.user_attrs:  # measured, and not yet told
            study.tell(trial.number, EndedTrial.from_dict(trial.user_attrs).score)
        else:
            study.tell(trial.number, state=TrialState.FAIL)


def trials_of(trials: Iterable[FrozenTrial]) -> list[Trial]:
    """The records of the trials that are finished, in the order in which they were begun."""
    finished = (trial_of(trial) for trial in trials if trial.state is TrialState.COMPLETE)
    return sorted(finished, key=lambda trial: trial.number)


def trial_of(trial: FrozenTrial) -> Trial:
    """The record of a finished Optuna trial that `Store` wrote."""
    begun, ended = BegunTrial.from_dict(trial.user_attrs), EndedTrial.from_dict(trial.user_attrs)
    assert trial.value is not None  # every finished trial has one
    return Trial(
        number=_number(trial, begun),
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


def _number(trial: FrozenTrial, begun: BegunTrial) -> int:
    """The trial's number, counted over search and play-off together."""
    return trial.number if begun.number is None else begun.number


def facts_of(study: str, attributes: Mapping[str, Any]) -> StudyFacts:
    """What a study keeps beside its trials.

    Args:
        study: the study's name and where it is kept, for messages.
        attributes: the study's user attributes in Optuna.

    Raises:
        StudyError: a later version wrote it.
    """
    require_readable(f"the study {study}", attributes.get("format", 1), FORMAT)
    return StudyFacts.from_dict(attributes)


def keep_recheck(url: str, study: str, recheck: Recheck) -> None:
    """Add what a later run of the answer saw to what a study keeps. It may be written while a search writes.

    Args:
        url: the storage's.

    Raises:
        StudyError: the storage cannot be written.
    """
    with opening_errors(url, "written", "a database that this user may write to"):
        kept = optuna.load_study(study_name=study, storage=connect(url))
        known = facts_of(study, kept.user_attrs).rechecks
        kept.set_user_attr("rechecks", [one.to_dict() for one in (*known, recheck)])


def stored_facts(place: Place) -> StudyFacts | None:
    """What an existing study keeps; None if no search has been there.

    Raises:
        StudyError: the storage cannot be opened; this call finds that out before the slow work begins.
    """
    if place.file is not None and not place.file.exists():
        return None
    with _opening(place), contextlib.suppress(KeyError):  # no such study
        attributes = optuna.load_study(study_name=place.study, storage=connect(place.storage)).user_attrs
        if "fingerprint" in attributes:
            return facts_of(f"{place.study} in {place.storage}", attributes)
    return None


def _cause(error: BaseException) -> str:
    """The first line of the database's own message; Optuna's message around it speaks of invalid data."""
    while isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    return first_line(getattr(error, "orig", None) or error)
