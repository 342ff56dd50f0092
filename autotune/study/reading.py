"""Reading a study: every probe and the last answer, as plain data. Never writes; works while a search writes."""

from __future__ import annotations

import contextlib
import difflib
import functools
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from autotune.errors import StudyError
from autotune.records.config import Choice, Config
from autotune.records.front import pareto_front
from autotune.records.outcome import Outcome
from autotune.records.prediction import Forecast
from autotune.records.result import Measured, Result
from autotune.study.history import feasible_each_time
from autotune.tuning.playoff import Entrant

if TYPE_CHECKING:
    import pandas as pd

_SQLITE_FILE = "sqlite:///"


@dataclass(frozen=True, kw_only=True)
class ProbeRecord:
    """One finished probe of a study.

    Attributes:
        number: of the Optuna trial.
        stage: `baseline`, `search`, `ablation` or `play-off`.
        feasible: it ran, within the memory limit less headroom.
        score: what the study was told; larger is better.
        reason: why this config was probed.
        forecast: what was predicted of it before it ran; None in the play-off, and in studies without predictions.
        round: of the play-off, counted from 0; None elsewhere.
        disturbed: other work on the machine was seen to disturb the timing.
        wall_s: from start to end, process start included.
    """

    number: int
    stage: str
    config: dict[str, Choice]
    outcome: Outcome
    feasible: bool
    score: float
    reason: str
    forecast: Forecast | None
    round: int | None
    disturbed: bool
    started: datetime
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as it was when it was read.

    Attributes:
        name: the study's name in its storage.
        storage: a file path or a URL, as it was given.
        attributes: what the search noted about itself: `task`, `objective`, `memory_limit_bytes`, `headroom`,
            `fingerprint`, `space`, `unsupported`, `baseline_config`, `warnings`.
        probes: every finished probe, in order.
        num_running: probes in progress, or left so by a search that was killed.
        num_lost: trials without an outcome: interrupted, or a fault of the machine.
        result: the last answer; None when no search of the study has come to one.
    """

    name: str
    storage: str
    attributes: dict[str, Any] = field(repr=False)
    probes: tuple[ProbeRecord, ...] = field(repr=False)
    num_running: int
    num_lost: int
    result: Result | None = field(repr=False)

    @property
    def baseline_config(self) -> dict[str, Choice]:
        """What the user ran before; empty when the search did not come so far."""
        return dict(self.attributes.get("baseline_config", {}))

    @property
    def memory_limit_bytes(self) -> int:
        """Memory limit of every probe, headroom included."""
        return int(self.attributes.get("memory_limit_bytes", 0))

    @property
    def headroom(self) -> float:
        """Share of the limit that a feasible config leaves free."""
        return float(self.attributes.get("headroom", 0.0))

    def frame(self) -> pd.DataFrame:
        """One row a probe, one column a technique or figure; `autotune.report.frame.probe_frame` lists them."""
        from autotune.report.frame import probe_frame

        return probe_frame(self)

    def front(self) -> pd.DataFrame:
        """One row for each config of `front_configs`, by increasing memory."""
        from autotune.report.frame import front_frame

        return front_frame(self)

    def measured_configs(self) -> tuple[Measured, ...]:
        """Every config that was feasible each time it ran, once each; a failure that passed when it was tried again is forgotten.

        Where a config took part in the play-off, its processes there alone count, as they do for the answer.
        """
        found = []
        for config, probes in feasible_each_time((Config(tuple(p.config.items())), p) for p in self.probes).items():
            confirmed = [probe for probe in probes if probe.stage == "play-off"] or probes
            found.append(Entrant(config, {probe.number: probe.outcome for probe in confirmed}).measured())
        return tuple(found)

    def front_configs(self) -> tuple[Measured, ...]:
        """The memory/throughput front: the feasible configs that no other beats in both, by increasing memory."""
        measured = self.measured_configs()
        return tuple(measured[index] for index in pareto_front([(m.peak_bytes, m.samples_per_s) for m in measured]))


def load_study(path_or_url: str | Path, *, study: str | None = None) -> Study:
    """Read a study.

    Args:
        path_or_url: a database file such as `studies/gpt.db`, or an Optuna storage URL such as `sqlite:///studies/gpt.db`.
        study: the study's name; may be left out where the storage holds one study.

    Raises:
        StudyError: no such file, no database, no study of that name, several studies and no name given, or a study
            that autotune did not make.
    """
    given = str(path_or_url)
    file = _database_file(given)
    if file is not None:
        _require_database(file)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with _storage_errors(given):
        if file is None:
            storage = RDBStorage(given, skip_table_creation=True)
        else:
            connect = functools.partial(_connect, file)
            storage = RDBStorage(
                "sqlite://", engine_kwargs={"creator": connect, "poolclass": NullPool}, skip_table_creation=True
            )
        try:
            names = [summary.study_name for summary in storage.get_all_studies()]
            loaded = optuna.load_study(study_name=_choose(names, study, given), storage=storage)
            attributes = loaded.user_attrs
            trials = loaded.get_trials(deepcopy=False)
        finally:
            storage.remove_session()
            storage.engine.dispose()
    if "format" not in attributes:
        raise StudyError(
            f"the study {loaded.study_name} in {given} was not made by autotune, so there are no probes to show; "
            "expected a study that `autotune search` wrote"
        )
    answer = attributes.get("result")
    return Study(
        name=loaded.study_name,
        storage=given,
        attributes={key: value for key, value in attributes.items() if key != "result"},
        probes=tuple(_record(trial) for trial in trials if trial.state is TrialState.COMPLETE),
        num_running=sum(trial.state is TrialState.RUNNING for trial in trials),
        num_lost=sum(trial.state is TrialState.FAIL for trial in trials),
        result=Result.from_dict(answer) if answer else None,
    )


def _record(trial: FrozenTrial) -> ProbeRecord:
    attributes = trial.user_attrs
    outcome = Outcome.from_dict(attributes["outcome"])
    assert trial.datetime_start is not None and trial.value is not None  # every complete trial has both
    return ProbeRecord(
        number=trial.number,
        stage=attributes["stage"],
        config=attributes["config"],
        outcome=outcome,
        feasible=attributes["feasible"],
        score=trial.value,
        reason=attributes["reason"],
        forecast=Forecast.from_dict(attributes["forecast"]) if attributes.get("forecast") else None,
        round=attributes.get("round"),
        disturbed=attributes.get("disturbed", False),
        started=trial.datetime_start,
        wall_s=outcome.wall_s,
    )


def _database_file(given: str) -> Path | None:
    """The file of an SQLite database; None for a storage that is none."""
    if given.startswith(_SQLITE_FILE):
        return Path(given.removeprefix(_SQLITE_FILE))
    return None if "://" in given else Path(given)


def _connect(file: Path) -> sqlite3.Connection:
    """Open an SQLite file that exists. `mode=rw` never creates, and is read-only where the file may not be written."""
    return sqlite3.connect(
        f"file:{quote(str(file.absolute()))}?mode=rw", uri=True, timeout=20.0, check_same_thread=False
    )


def _require_database(file: Path) -> None:
    """Refuse what is no Optuna database, without touching it: Optuna would make a file, or tables in a foreign one."""
    if file.is_dir():
        raise StudyError(f"{file} is a folder; expected a database file{_databases_near(file)}")
    if not file.exists():
        raise StudyError(f"there is no study file {file}{_databases_near(file)}")
    try:
        with contextlib.closing(_connect(file)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise StudyError(
            f"{file} cannot be read as a study: {error}; expected the SQLite database of a search"
        ) from None
    if not {"studies", "alembic_version"} <= tables:
        raise StudyError(f"{file} is a database without a study in it; expected one that `autotune search` wrote")


def _databases_near(file: Path) -> str:
    """Databases that the user may have meant, in words."""
    folders = [file] if file.is_dir() else [file.parent, Path("studies")]
    found = sorted({path for folder in folders if folder.is_dir() for path in folder.glob("*.db")})
    if not found:
        return "; `autotune search model.py` makes one in studies/"
    close = difflib.get_close_matches(file.stem, [path.stem for path in found], n=3, cutoff=0.5)
    named = [path for path in found if path.stem in close] or found[:5]
    return f"; did you mean {' or '.join(str(path) for path in named)}?"


def _choose(names: list[str], wanted: str | None, given: str) -> str:
    listed = ", ".join(sorted(names))
    if wanted is None and len(names) == 1:
        return names[0]
    if not names:
        raise StudyError(f"{given} holds no study yet; `autotune search` makes one")
    if wanted is None:
        raise StudyError(f"{given} holds {len(names)} studies; choose one with --study: {listed}")
    if wanted not in names:
        raise StudyError(f"{given} holds no study {wanted!r}; it holds: {listed}")
    return wanted


@contextlib.contextmanager
def _storage_errors(given: str) -> Iterator[None]:
    try:
        yield
    except StudyError:
        raise
    except Exception as error:  # SQLAlchemy's many, a driver that is missing, an unknown kind of URL
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise StudyError(
            f"the storage {given} cannot be read: {first_line}; expected a database file such as studies/gpt.db, "
            "or a URL such as sqlite:///studies/gpt.db with --study NAME"
        ) from None
