"""Reads a study as plain data: every probe and the last answer. It never writes, and works while a search writes."""

from __future__ import annotations

import contextlib
import difflib
import functools
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState
from sqlalchemy.pool import NullPool

from autotune.errors import StudyError
from autotune.records.config import Choice, Config
from autotune.records.measured import Measured, front_of
from autotune.records.result import Result
from autotune.records.study import DECIDING, StudyFacts, Trial
from autotune.study.backends import shared_backend_of
from autotune.study.backends.base import without_password
from autotune.study.facts import facts_of, is_only_agreed
from autotune.study.figures import at_one_time, measured, undisturbed
from autotune.study.history import feasible_each_time
from autotune.study.place import DEFAULT_FOLDER, PLAY_OFF_OF, file_of, url_of
from autotune.study.storage import connect, opening_errors
from autotune.study.trials import trials_of
from autotune.techniques import Techniques, find_techniques

if TYPE_CHECKING:
    import pandas as pd
    from optuna.study._frozen import FrozenStudy


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as it was when it was read.

    Attributes:
        name: the study's name in its storage.
        storage: a file path, or a URL without its password.
        url: the URL with which it can be opened again.
        facts: what the searches recorded beside the probes, without the answer, which is in `result`.
        probes: every finished probe, in order.
        techniques: the installed techniques, which describe the configs in words.
        others: names of the task's studies with other memory limits, in the same storage.
        num_running: probes in progress, or left in that state by a search that was killed.
        num_lost: trials without an outcome: interrupted by the user or by a fault of the machine.
        result: the last answer; None if no search of the study has found one.
    """

    name: str
    storage: str
    url: str = field(repr=False)
    facts: StudyFacts = field(repr=False)
    probes: tuple[Trial, ...] = field(repr=False)
    num_running: int
    num_lost: int
    result: Result | None = field(repr=False)
    techniques: Techniques = field(repr=False)
    others: tuple[str, ...] = ()

    @property
    def file(self) -> Path | None:
        """The database's file; None for another kind of storage."""
        return _database_file(self.storage)

    @property
    def baseline_config(self) -> dict[str, Choice]:
        """The user's baseline; empty if the search did not get that far."""
        return self.facts.baseline_config

    @property
    def memory_limit_bytes(self) -> int:
        """Memory limit of every probe; the headroom is part of it."""
        return self.facts.memory_limit_bytes

    @property
    def headroom(self) -> float:
        """Share of the limit that a feasible config leaves free."""
        return self.facts.headroom

    def answer(self) -> Result:
        """The last answer.

        Raises:
            StudyError: there is none.
        """
        if self.result is None:
            if why := self.facts.no_answer:
                raise StudyError(f"the study {self.name} has no answer: {why}")
            raise StudyError(
                f"the study {self.name} has no answer yet; the same `autotune search` command continues it"
            )
        return self.result

    def frame(self) -> pd.DataFrame:
        """One row per probe, one column per technique or figure; `autotune.study.frame.probe_frame` lists them."""
        from autotune.study.frame import probe_frame

        return probe_frame(self.probes, self.baseline_config)

    def front(self) -> pd.DataFrame:
        """One row for each config of `front_configs`, by increasing memory."""
        from autotune.study.frame import front_frame

        return front_frame(self.front_configs(), self.baseline_config, self.techniques)

    def measured_configs(self) -> tuple[Measured, ...]:
        """Every config whose last trial in the search, and all of whose trials in the play-off, were feasible.

        If a config took part in the play-off, only its processes there count, as for the answer. The speeds of the others are
        reduced as far as the configs that ran in both were slower in the play-off.
        """
        searched: dict[Config, Measured] = {}
        played: dict[Config, Measured] = {}
        disturbed: list[Config] = []
        for config, trials in feasible_each_time(self.probes).items():
            for found, in_play_off in ((searched, False), (played, True)):
                if outcomes := [trial.outcome for trial in trials if trial.in_play_off is in_play_off]:
                    found[config] = measured(config, outcomes)
                    disturbed += [config] if not in_play_off and not undisturbed(outcomes) else []
        return tuple(at_one_time(searched, played, disturbed).values())

    def front_configs(self) -> tuple[Measured, ...]:
        """The memory/throughput front: the feasible configs that no other beats in both, by increasing memory."""
        return front_of(self.measured_configs())


def load_study(path_or_url: str | Path, *, study: str | None = None) -> Study:
    """Read a study.

    Args:
        path_or_url: a database file such as `studies/gpt.db`, `gpt` for short, or an Optuna storage URL such as `sqlite:///studies/gpt.db`.
        study: the study's name. It may be left out if the studies in the storage differ only in their memory limit, apart from
            those that rank another choice of what is trained: the one that was searched last is read then.

    Raises:
        StudyError: no such file, no database, no study of that name, several studies and no name given, or a study
            that autotune did not make.
    """
    given = str(path_or_url)
    file = _database_file(given)
    shown = _shown(given, file)
    with _opened(given, file) as storage:
        kept = [one for one in storage.get_all_studies() if not is_only_agreed(one.user_attrs)]
        searches = _searches(kept)
        own = _users_own(searches)
        name = _choose(searches if study else own, study, shown)
        parts = [one.study_name for one in kept if name in (one.study_name, one.user_attrs.get(PLAY_OFF_OF))]
        studies = [optuna.load_study(study_name=part, storage=storage) for part in parts]
        attributes = next(one for one in studies if one.study_name == name).user_attrs
        trials = [trial for one in studies for trial in one.get_trials(deepcopy=False)]
    if "format" not in attributes:
        raise StudyError(
            f"the study {name} in {shown} was not made by autotune, so there are no probes to show; "
            "expected a study that `autotune search` wrote"
        )
    facts = facts_of(f"{name} in {shown}", attributes)
    probes = [trial for trial in trials if trial.user_attrs.get("stage") != DECIDING]
    return Study(
        name=name,
        storage=shown if "://" in given else str(file),
        url=given if file is None else url_of(file.absolute()),
        facts=replace(facts, result=None),
        techniques=find_techniques(),
        others=_of_one_task(own, name),
        probes=tuple(trials_of(probes)),
        num_running=sum(trial.state is TrialState.RUNNING for trial in probes),
        num_lost=sum(trial.state is TrialState.FAIL for trial in probes),
        result=facts.result,
    )


def studies_in(path_or_url: str | Path) -> list[str]:
    """Names of the studies that searches have made in a storage, apart from those that rank another choice of what is trained.

    Raises:
        StudyError: no such file, or no database.
    """
    given = str(path_or_url)
    with _opened(given, _database_file(given)) as storage:
        made = [one for one in storage.get_all_studies() if "format" in one.user_attrs]
    return list(_users_own(_searches(made)))


@contextlib.contextmanager
def _opened(given: str, file: Path | None) -> Iterator[BaseStorage]:
    """Optuna's storage for reading. Raises StudyError where it cannot be read."""
    if file is not None:
        _require_database(file)
    expected = "a database file such as studies/gpt.db, or a URL such as sqlite:///studies/gpt.db with --study NAME"
    with opening_errors(_shown(given, file), "read", expected), _reading(given, file) as storage:
        yield storage


def _shown(given: str, file: Path | None) -> str:
    return str(file) if file is not None else without_password(given)


@contextlib.contextmanager
def _reading(url: str, file: Path | None) -> Iterator[BaseStorage]:
    """Optuna's storage, in which nothing is created, at a URL or in an SQLite file."""
    backend = shared_backend_of(url)
    if backend is not None:
        shared = connect(url, must_exist=True)
        try:
            yield shared
        finally:
            backend.close(shared)
        return
    own = (
        {} if file is None else {"engine_kwargs": {"creator": functools.partial(_connect, file), "poolclass": NullPool}}
    )
    storage = connect(url if file is None else "sqlite://", **own, skip_table_creation=True)
    assert isinstance(storage, RDBStorage)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def open_to_show(path_or_url: str | Path) -> tuple[BaseStorage, str]:
    """Optuna's storage of a study that `load_study` would read, and how it is called, without a password.

    Raises:
        StudyError: no such file, a file that is no study's database, or a storage that cannot be opened.
    """
    given = str(path_or_url)
    file = _database_file(given)
    if file is not None:
        _require_database(file)
        url = url_of(file.absolute())
        return connect(url), url
    nothing_new = {"must_exist": True} if shared_backend_of(given) is not None else {}
    with opening_errors(without_password(given), "read", "a storage with a study that `autotune search` wrote"):
        return connect(given, **nothing_new), without_password(given)


def _database_file(given: str) -> Path | None:
    """The file of an SQLite database, which may be given by the name that `--study` took; None for another kind of storage."""
    if "://" in given:
        return file_of(given)
    named = Path(DEFAULT_FOLDER) / f"{given}.db"
    return named if named.is_file() and not Path(given).is_file() else Path(given)  # a folder may have a model's name


def _connect(file: Path) -> sqlite3.Connection:
    """Open an SQLite file that exists. `mode=rw` never creates, and is read-only where the file may not be written."""
    return sqlite3.connect(
        f"file:{quote(str(file.absolute()))}?mode=rw", uri=True, timeout=20.0, check_same_thread=False
    )


def _require_database(file: Path) -> None:
    """Refuse a file that is not an Optuna database, and leave it untouched: Optuna would create the file, or tables in it."""
    if file.is_dir():
        raise StudyError(f"{file} is a folder; expected a database file{_databases_near(file)}")
    if not file.exists():
        raise StudyError(f"there is no study file {file}{_databases_near(file)}")
    try:
        with contextlib.closing(_connect(file)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise StudyError(
            f"{file} cannot be read as a study: {error}; expected the SQLite database of a search{_databases_near(file)}"
        ) from None
    if not {"studies", "alembic_version"} <= tables:
        raise StudyError(f"{file} is a database without a study in it; expected one that `autotune search` wrote")


def _databases_near(file: Path) -> str:
    """Databases that the user may have meant, in words."""
    folders = [file if file.is_dir() else file.parent, Path(DEFAULT_FOLDER)]
    found = sorted({path for folder in folders if folder.is_dir() for path in folder.glob("*.db")} - {file})
    if not found:
        return f"; `autotune search model.py` makes one in {DEFAULT_FOLDER}/"
    close = difflib.get_close_matches(file.stem, [path.stem for path in found], n=3, cutoff=0.5)
    if named := [str(path) for path in found if path.stem in close]:
        return f"; did you mean {' or '.join(named)}?"
    return f"; there is {', '.join(map(str, found[:5]))}"


def _searches(kept: Iterable[FrozenStudy]) -> dict[str, StudyFacts]:
    """The studies that are no play-off's, by name, with the facts by which they are chosen."""
    return {one.study_name: _whose(one.user_attrs) for one in kept if PLAY_OFF_OF not in one.user_attrs}


def _users_own(searches: Mapping[str, StudyFacts]) -> dict[str, StudyFacts]:
    """Those that train what the user asked for: not another choice of what is trained, ranked beside one of them."""
    return {name: about for name, about in searches.items() if about.ranked_beside not in searches}


def _whose(attributes: Mapping[str, Any]) -> StudyFacts:
    """The facts by which a study is chosen in its file, where studies of any format, and studies not ours, may be."""
    names = ("searched_at", "limited_beside", "ranked_beside")
    return StudyFacts.from_dict({name: attributes[name] for name in names if name in attributes})


def _choose(searches: Mapping[str, StudyFacts], wanted: str | None, given: str) -> str:
    """The study wanted. Without a name: the only one, or where all differ only in their memory limit, the one searched last.

    Args:
        searches: the facts of each study, by its name.
    """
    listed = ", ".join(sorted(searches))
    if not searches:
        raise StudyError(f"{given} holds no study yet; `autotune search` makes one")
    if wanted is None:
        last = max(searches, key=lambda name: searches[name].searched_at)
        if len(_of_one_task(searches, last)) + 1 < len(searches):
            raise StudyError(f"{given} holds {len(searches)} studies; choose one with --study: {listed}")
        return last
    if wanted not in searches:
        raise StudyError(f"{given} holds no study {wanted!r}; it holds: {listed}")
    return wanted


def _of_one_task(searches: Mapping[str, StudyFacts], name: str) -> tuple[str, ...]:
    """The other studies that differ from `name` only in their memory limit."""
    first = {other: about.limited_beside or other for other, about in searches.items()}
    return tuple(sorted(other for other in first if other != name and first[other] == first.get(name)))
