"""PostgreSQL: a server for searches on several machines, with Optuna's heartbeats, which the server's own clock times."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Container, Iterator
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from autotune.errors import StudyError
from autotune.study.backends.base import Freed, SharedBackend, without_password

SCHEMA = "the tables"
SILENT_BEATS = 2  # without so many heartbeats a search is looked after

# libpq's: a server that does not answer is given up after seconds, not after the kernel's hours
CONNECTION: dict[str, Any] = {
    "connect_timeout": 5,  # s
    "keepalives_idle": 5,  # s
    "keepalives_interval": 2,  # s
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # ms
}
# The server's, for each connection: a search that stops between two statements must not keep the others waiting. A heartbeat is kept
# without its zone, so all have to write it in one.
SESSION = (
    "SET TIME ZONE 'UTC'",
    "SET lock_timeout = '10s'",
    "SET statement_timeout = '30s'",
    "SET idle_in_transaction_session_timeout = '10s'",
    "SET tcp_keepalives_idle = 5",
    "SET tcp_keepalives_interval = 2",
    "SET tcp_keepalives_count = 3",
)
BEAT = text(
    "INSERT INTO trial_heartbeats (trial_id, heartbeat) VALUES (:trial_id, CURRENT_TIMESTAMP) "
    "ON CONFLICT (trial_id) DO UPDATE SET heartbeat = excluded.heartbeat"
)
SILENT = text(
    "SELECT EXISTS (SELECT 1 FROM trials LEFT JOIN trial_heartbeats USING (trial_id) "
    "WHERE state = 'RUNNING' AND study_id = ANY(:studies) "
    "AND (heartbeat IS NULL OR heartbeat < CURRENT_TIMESTAMP - make_interval(secs => :silent_s)))"
)
# A search that dies between a trial's first commit and its first heartbeat would keep the trial for ever.
FIRST_HEARTBEATS = text(
    "INSERT INTO trial_heartbeats (trial_id, heartbeat) SELECT trial_id, CURRENT_TIMESTAMP FROM trials "
    "WHERE state = 'RUNNING' AND study_id = ANY(:studies) "
    "AND NOT EXISTS (SELECT 1 FROM trial_heartbeats beats WHERE beats.trial_id = trials.trial_id) "
    "ON CONFLICT DO NOTHING"
)
LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")
TRY_LOCK = text("SELECT pg_try_advisory_xact_lock(hashtextextended(:name, 0))")
STATES = text(
    "SELECT trial_id, state FROM trials WHERE study_id = :study AND (trial_id = ANY(:ids) OR trial_id > :after) "
    "ORDER BY trial_id"
)


class _Database(RDBStorage):
    """Optuna's tables, with fewer messages to the server. Searches wait for each other while one of them begins a trial: it looks at what
    the others run, for which Optuna reads every running trial in full, and it writes a trial, for which Optuna asks two or three times
    for each value.

    Here a trial is read in full when it is new and when its state has changed, and the values of a new trial are written at once.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._running: dict[int, FrozenTrial] = {}  # as they were first read
        self._distributions: dict[int, dict[str, BaseDistribution]] = {}  # of each study, as its trials have them

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        if states is not None:
            return super()._get_trials(study_id, states, included_trial_ids, trial_id_greater_than)
        asked = {"study": study_id, "ids": [*included_trial_ids], "after": trial_id_greater_than}
        # a transaction of its own would take two more messages
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            found = {trial_id: TrialState[state] for trial_id, state in connection.execute(STATES, asked)}
        ids = [
            trial_id for trial_id in found if found[trial_id] is not TrialState.RUNNING or trial_id not in self._running
        ]
        read = {}
        if ids:
            read = {trial._trial_id: trial for trial in super()._get_trials(study_id, None, {*ids}, max(ids))}
        for trial_id, trial in read.items():
            if trial.state is TrialState.RUNNING:
                self._running[trial_id] = trial
            else:
                self._running.pop(trial_id, None)
        return [read.get(trial_id) or self._running[trial_id] for trial_id in sorted({*found, *read})]

    def _get_prepared_new_trial(
        self, study_id: int, template_trial: FrozenTrial | None, session: Session
    ) -> models.TrialModel:
        new, known = template_trial, self._distributions.get(study_id)
        if new is None or new.state is not TrialState.RUNNING or known != new.distributions:
            # Optuna compares the distributions with those of the study
            written = super()._get_prepared_new_trial(study_id, new, session)
            if new is not None:
                self._distributions[study_id] = new.distributions
            return written
        # a running trial has parameters and attributes, and nothing else yet
        trial = models.TrialModel(study_id=study_id, state=new.state, datetime_start=new.datetime_start)
        session.add(trial)
        session.flush()  # its id and its place among the study's trials
        session.add_all(
            models.TrialParamModel(
                trial_id=trial.trial_id,
                param_name=name,
                param_value=distribution.to_internal_repr(new.params[name]),
                distribution_json=distribution_to_json(distribution),
            )
            for name, distribution in new.distributions.items()
        )
        session.add_all(
            models.TrialUserAttributeModel(trial_id=trial.trial_id, key=key, value_json=json.dumps(value))
            for key, value in new.user_attrs.items()
        )
        trial.number = trial.count_past_trials(session)
        return trial


class Postgres(SharedBackend):
    """Studies on a PostgreSQL server."""

    name = "postgresql"
    example = "postgresql+psycopg://USER@HOST/DATABASE"
    purpose = "a server; pip install 'autotune-torch[postgres]'"
    keeps_heartbeats = True

    def connect(self, url: str, *, freed: Freed | None = None, must_exist: bool = False) -> BaseStorage:
        written = _written(url)
        options: dict[str, Any] = {
            # one connection is kept; further ones, for a lock or a heartbeat, are opened when they are needed: a server has 100 by default
            "engine_kwargs": {**_engine_options(), "pool_pre_ping": True, "pool_size": 1, "max_overflow": 4},
            "heartbeat_interval": self.beat_s,
            "grace_period": self.gone_after_s,
            "heartbeat_stale_trial_callback": freed,
            "skip_table_creation": must_exist,
        }
        try:
            engine = create_engine(written, poolclass=NullPool, **_engine_options())
            # two that open an empty database at once would both create the tables; also who only reads would create some
            with _alone(engine, SCHEMA):
                if must_exist and not inspect(engine).has_table("studies"):
                    raise StudyError(f"{without_password(url)} holds no study yet; `autotune search` makes one")
                return _Database(written, **options)
        except ImportError as error:
            raise StudyError(
                f"the storage {without_password(url)} needs psycopg, which cannot be imported ({error.__cause__ or error}); "
                "`pip install 'autotune-torch[postgres]'` adds it"
            ) from None

    def alone(self, storage: BaseStorage, study: str) -> contextlib.AbstractContextManager[None]:
        return _alone(_database(storage).engine, study)

    @contextlib.contextmanager
    def alone_to_begin(self, storage: BaseStorage, study: str, what: str) -> Iterator[bool]:
        with _database(storage).engine.begin() as connection:
            is_first = connection.execute(TRY_LOCK, {"name": f"autotune {study} {what}"}).scalar()
            if is_first:
                connection.execute(LOCK, {"name": f"autotune {study}"})
            yield bool(is_first)

    def may_pass(self, error: BaseException) -> bool:
        while isinstance(error, StorageInternalError) and error.__cause__ is not None:
            error = error.__cause__
        is_cut = isinstance(error, DBAPIError) and error.connection_invalidated
        # the last one: Optuna asks once more in a transaction whose connection was cut
        return is_cut or isinstance(error, OperationalError | InterfaceError | PendingRollbackError)

    def beat(self, storage: BaseStorage, trial_ids: Collection[int]) -> None:
        if trial_ids:
            with _database(storage).engine.begin() as connection:
                connection.execute(BEAT, [{"trial_id": trial_id} for trial_id in sorted(trial_ids)])

    def all_are_heard(self, storage: BaseStorage, study_ids: Collection[int]) -> bool:
        studies = {"studies": [*study_ids]}
        with _database(storage).engine.begin() as connection:
            if not connection.execute(SILENT, {**studies, "silent_s": SILENT_BEATS * self.beat_s}).scalar():
                return True
            connection.execute(FIRST_HEARTBEATS, studies)
        return False

    def close(self, storage: BaseStorage) -> None:
        database = _database(storage)
        database.remove_session()
        database.engine.dispose()


def _written(url: str) -> str:
    """The URL with the driver that is meant, whichever it names."""
    parsed: URL = make_url(url).set(drivername="postgresql+psycopg")
    return parsed.render_as_string(hide_password=False)


def _engine_options() -> dict[str, Any]:
    return {"connect_args": CONNECTION, "pool_events": [(_begin_session, "connect")]}


def _begin_session(connection: Any, record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("; ".join(SESSION))  # in one message: a lock, too, takes a new connection
    connection.commit()  # else the settings go with the first transaction that is undone


@contextlib.contextmanager
def _alone(engine: Engine, name: str) -> Iterator[None]:
    """Hold the server's lock of that name for as long as a transaction of its own is open."""
    with engine.begin() as connection:
        connection.execute(LOCK, {"name": f"autotune {name}"})
        yield


def _database(storage: BaseStorage) -> RDBStorage:
    """The database behind Optuna's cache."""
    found = getattr(storage, "_backend", storage)
    assert isinstance(found, RDBStorage)
    return found
