"""The study: one Optuna trial per probe, kept so that nothing is lost and nothing is measured twice."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.trial import Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import StudyError
from autotune.predict.cache import FOLDER as TRACES_FOLDER
from autotune.proposers.cost_model import CostModelSampler
from autotune.proposers.optuna_samplers import AdmissibleSampler
from autotune.records.config import Config
from autotune.records.objective import Objective
from autotune.records.outcome import Outcome
from autotune.records.prediction import Forecast
from autotune.space import Space

FORMAT = 1
DEFAULT_FOLDER = "studies"


@dataclass(frozen=True, kw_only=True)
class Probed:
    """One finished probe of the study."""

    number: int
    stage: str
    config: Config
    outcome: Outcome
    feasible: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a study is kept."""

    storage: str  # a URL
    study: str
    file: Path | None  # of an SQLite database

    @property
    def logs(self) -> Path:
        """Folder for what the user's code prints, one file a probe."""
        return (self.file or Path(DEFAULT_FOLDER) / self.study).with_suffix(".logs")

    @property
    def lock(self) -> Path:
        """File that a search locks. On a database server it is this machine's searches that it keeps apart."""
        if self.file is not None:
            return self.file.with_name(self.file.name + ".lock")
        name = hashlib.sha256(f"{self.storage} {self.study}".encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"autotune-{name}.lock"

    @property
    def traces(self) -> Path:
        """Folder for traced memory, shared by the studies beside each other."""
        return (self.file.parent if self.file else Path(DEFAULT_FOLDER)) / TRACES_FOLDER


def place_of(storage: str | None, study: str | None, task: str) -> Place:
    """Where the study of a task goes: `studies/<task>.db` unless told otherwise. `storage` is a URL or a database file."""
    name = study or task
    if storage is None:
        storage = str(Path(DEFAULT_FOLDER) / f"{name}.db")
    if "://" not in storage:
        file = Path(storage).absolute()
        return Place(storage=f"sqlite:///{file}", study=name, file=file)
    file_url = storage.startswith("sqlite:///") and ":memory:" not in storage
    return Place(storage=storage, study=name, file=Path(storage.removeprefix("sqlite:///")) if file_url else None)


@contextlib.contextmanager
def locked(place: Place) -> Iterator[None]:
    """Hold the study's lock: one search writes to a study at a time.

    Raises:
        StudyError: another search holds it, or the folder cannot be written.
    """
    if ":memory:" in place.storage:  # nobody else's
        yield
        return
    lock = filelock.FileLock(place.lock)
    where = place.file or f"{place.study} in {place.storage}"
    try:
        place.lock.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise StudyError(
            f"the study {where} is in use by another search (lock {place.lock.name}); wait for it to end, "
            "or give this one its own with --study NAME"
        ) from None
    except OSError as error:
        raise StudyError(f"the storage {where} cannot be opened: {error}; choose another with --storage") from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def storage_errors(place: Place) -> Iterator[None]:
    """Tell what the storage fails of while a study is in use: a lock, a full disk, a server that has gone.

    Raises:
        StudyError: in place of the storage's own exception.
    """
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        raise StudyError(
            f"the study {place.study} in {place.storage} cannot be read or written any more: {_cause(error)}; see "
            "that its disk has room and nothing else holds it, and run the same command again: it goes on where it stopped"
        ) from error


class Store:
    """A study opened for writing.

    Args:
        fingerprint: what must be equal for measurements to be comparable: task, device, versions, limits.
        attributes: further facts about the search, for whoever reads the study.

    Raises:
        StudyError: the storage cannot be opened, holds something else, or another fingerprint.
    """

    def __init__(self, place: Place, fingerprint: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        warnings.filterwarnings("ignore", category=ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.place = place
        try:
            self._study = optuna.create_study(
                storage=place.storage, study_name=place.study, direction="maximize", load_if_exists=True
            )
        except Exception as error:  # SQLAlchemy's many, a driver that is missing, a file that is no database
            raise StudyError(
                f"the storage {place.storage} cannot be opened: {_cause(error)}; "
                "expected a database file that nothing else holds, or a URL such as sqlite:///studies/gpt.db"
            ) from None
        known = self._study.user_attrs.get("fingerprint")
        if known is None and self._study.trials:
            raise StudyError(
                f"the study {place.study} in {place.storage} was not made by autotune; use another with --study"
            )
        if known is not None:
            _require_equal(place, known, dict(fingerprint))
        for key, value in {"format": FORMAT, "fingerprint": dict(fingerprint), **attributes}.items():
            self._study.set_user_attr(key, value)
        for trial in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING, TrialState.WAITING]):
            # heartbeats do not work with ask and tell; the lock says that nobody runs these
            if trial.state is TrialState.WAITING:
                self._study.ask()
            if "outcome" in trial.user_attrs:
                self._study.tell(trial.number, trial.user_attrs["score"])
            else:
                self._study.tell(trial.number, state=TrialState.FAIL)

    def attributes(self) -> dict[str, Any]:
        """The study's own attributes."""
        return dict(self._study.user_attrs)

    def set_attribute(self, key: str, value: Any) -> None:
        """Keep a JSON-ready fact with the study."""
        self._study.set_user_attr(key, value)

    def use_sampler(self, sampler: AdmissibleSampler | CostModelSampler) -> None:
        """Propose with this sampler from now on."""
        self._study.sampler = sampler

    def propose(self, space: Space) -> tuple[Trial, Config]:
        """A new trial with the sampler's config.

        Raises:
            SpaceExhausted: nothing is left to try.
        """
        trial = self._study.ask(dict(space.distributions))
        return trial, space.complete(trial.params)

    def forecast(self, cost_model: CostModelSampler, config: Config) -> Forecast:
        """What the finished probes of the study predict of a config."""
        return cost_model.forecast(self._study, config)

    def ranked(self, cost_model: CostModelSampler) -> list[Config]:
        """The feasible configs that were probed, best first by what all probes together say of each."""
        return cost_model.ranked(self._study)

    def abandon_running(self) -> None:
        """Close trials that were begun and will not be run."""
        for trial in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            self._study.tell(trial.number, state=TrialState.FAIL)

    def begin(self, config: Config, space: Space) -> Trial:
        """A new trial with a given config."""
        self._study.enqueue_trial(space.params(config))
        return self._study.ask(dict(space.distributions))

    def describe(
        self, trial: Trial, config: Config, *, stage: str, reason: str, forecast: Forecast | None, **extra: Any
    ) -> None:
        """Say what a trial is before it runs, so that a search that dies leaves evidence."""
        predicted = forecast.to_dict() if forecast is not None else None
        described = {"config": config.as_dict(), "stage": stage, "reason": reason, "forecast": predicted, **extra}
        for key, value in described.items():
            trial.set_user_attr(key, value)

    def finish(self, trial: Trial, outcome: Outcome, objective: Objective, *, worst: float, disturbed: bool) -> None:
        """Tell the study an outcome. Infeasible ones are told as complete with the worst value and a constraint."""
        infeasibility = objective.infeasibility(outcome)
        score = objective.score(outcome) if outcome.ok else worst
        trial.set_constraint("infeasibility", infeasibility)
        for key, value in {"score": score, "feasible": infeasibility <= 0, "disturbed": disturbed}.items():
            trial.set_user_attr(key, value)
        trial.set_user_attr("outcome", outcome.to_dict())  # last: with it the trial is finished, told or not
        self._study.tell(trial, score)

    def fail(self, trial: Trial, reason: str) -> None:
        """Close a trial that a fault of the machine, or the user, cut short."""
        trial.set_user_attr("fault", reason)
        self._study.tell(trial, state=TrialState.FAIL)

    def probed(self) -> list[Probed]:
        """Every finished probe, in order."""
        return [
            Probed(
                number=trial.number,
                stage=trial.user_attrs["stage"],
                config=Config(tuple(trial.user_attrs["config"].items())),
                outcome=Outcome.from_dict(trial.user_attrs["outcome"]),
                feasible=trial.user_attrs["feasible"],
            )
            for trial in self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        ]


def stored_attributes(place: Place) -> dict[str, Any]:
    """What an existing study says of itself; empty where there is none, or none that can be read."""
    if place.file is not None and not place.file.exists():
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with contextlib.suppress(Exception):  # no such study, no database: `Store` says what is wrong
        return dict(optuna.load_study(study_name=place.study, storage=place.storage).user_attrs)
    return {}


def _cause(error: BaseException) -> str:
    """The first line of what the database itself said; Optuna's own words around it speak of invalid data."""
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
            f"the study {place.study} in {place.storage} cannot be resumed, since its measurements would not compare: "
            f"{'; '.join(differences)}. Start another with --study NAME, or move the file away"
        )


def _shown(fingerprint: Mapping[str, Any], key: str) -> str:
    return repr(fingerprint[key]) if key in fingerprint else "not recorded"  # by another version
