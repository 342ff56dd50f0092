"""Several searches write to one study on a server: whose a trial is, how a dead search's is freed, and a storage that goes away."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy import event
from sqlalchemy.exc import InterfaceError, OperationalError, PendingRollbackError

from autotune.errors import StudyError
from autotune.records.config import Config
from autotune.records.study import PLAY_OFF, BegunTrial, Owner, Proposal
from autotune.study import sharing
from autotune.study.backends import postgres
from autotune.study.facts import agree_on_limit
from autotune.study.place import place_of
from autotune.study.reading import load_study, open_to_show
from autotune.study.storage import storage_errors
from autotune.study.trials import distributions_of
from autotune.tuning.state import Search
from tests.closed_form import ClosedFormRunner, make_search
from tests.postgres import PASSWORD, Network, Server, database, server

__all__ = ["database", "server"]

ELSEWHERE = Owner(host="elsewhere", pid=1, started="0 ticks after boot")
LONGEST_S = 60.0


class NoBeats(postgres.Postgres):
    def beat(self, *args: Any) -> None:
        """Die before it is written."""


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres.Postgres, "beat_s", 1)
    monkeypatch.setattr(postgres.Postgres, "gone_after_s", 2)


@pytest.fixture
def open_at(tmp_path: Path) -> Iterator[Callable[..., Search]]:
    """Opens searches, which are closed again."""
    opened: list[Search] = []

    def open_at(url: str, **changes: Any) -> Search:
        opened.append(make_search(tmp_path, changes.pop("runner", ClosedFormRunner()), storage=url, **changes))
        return opened[-1]

    yield open_at
    for search in opened:
        search.store.close()


def begin(search: Search, config: Config | None = None, **about: Any) -> int | None:
    space = search.history.space
    return search.store.begin(Proposal(config=config or space.baseline, **about), None, space, num_known=0)


def finish(search: Search, number: int) -> None:
    space, objective = search.history.space, search.history.objective
    outcome = ClosedFormRunner().outcome_of(space.baseline, search.settings)
    search.store.finish(number, outcome, objective, disturbed=False)


def eventually(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.1)


@contextlib.contextmanager
def on_another_machine() -> Iterator[None]:
    """What begins trials meanwhile is a process of another machine, which only heartbeats tell of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.study.store.this_process", lambda: ELSEWHERE)
        yield


def die(search: Search) -> None:
    """Show no sign of life any more."""
    assert search.store._watch is not None
    search.store._watch.close()


def test_a_config_that_another_search_runs_or_has_probed_since_is_not_begun(
    open_at: Callable[..., Search], database: str
) -> None:
    one, other = open_at(database), open_at(database)
    number = begin(one)
    assert number == 0 and begin(other) is None
    assert other.store.look().elsewhere == {one.history.space.baseline} and not one.store.look().elsewhere
    assert begin(other, stage=PLAY_OFF, round=0) == 1  # the play-off runs what is known
    finish(one, number)
    assert begin(other) is None
    assert [trial.number for trial in other.store.look().trials] == [0]


def test_of_searches_that_begin_a_config_at_the_same_instant_one_has_it(
    open_at: Callable[..., Search], database: str
) -> None:
    searches = [open_at(database) for _ in range(4)]
    found: list[int | None] = []
    gate = threading.Barrier(len(searches))

    def begin_together(search: Search) -> None:
        gate.wait()
        found.append(begin(search))

    threads = [threading.Thread(target=begin_together, args=(search,)) for search in searches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=str) == [0, None, None, None]


def test_who_wants_what_another_waits_to_begin_does_not_wait_for_it(
    open_at: Callable[..., Search], database: str
) -> None:
    one, other = open_at(database), open_at(database)
    config = one.history.space.baseline
    with one.store._alone_to_begin(Proposal(config=config)) as is_alone:
        assert is_alone and begin(other) is None
    assert other.store.look().elsewhere == {config}
    assert begin(one) == 0


def test_searches_that_open_an_empty_database_at_the_same_instant_agree_on_it(
    open_at: Callable[..., Search], database: str
) -> None:
    agreed: list[int] = []

    def open_together(free_bytes: int) -> None:
        agreed.append(agree_on_limit(place_of(database, None, "closed"), free_bytes))
        open_at(database)

    threads = [threading.Thread(target=open_together, args=(2**30 + number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(agreed) == 4 and len({*agreed}) == 1


def test_the_trial_of_a_search_without_heartbeats_is_freed_and_that_of_a_living_one_never(
    open_at: Callable[..., Search], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = open_at(database)
    begin(living, living.history.space.baseline.replace(amp="bf16"))
    with on_another_machine():
        dead = open_at(database)
        begin(dead)
    die(dead)
    eventually(lambda: living.store.look().elsewhere == frozenset())
    assert begin(living) is not None
    assert (
        len(living.store._own()) == 2 and load_study(database).num_running == 2 and load_study(database).num_lost == 1
    )


def test_clocks_of_machines_that_differ_by_an_hour_and_lie_in_other_zones_free_nothing(
    open_at: Callable[..., Search], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    with on_another_machine():
        ahead = open_at(database)
        begin(ahead)
    monkeypatch.setenv("PGTZ", "America/Lima")
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + 3600)
    here = open_at(database)
    time.sleep(3 * postgres.Postgres.gone_after_s)
    assert here.store.look().elsewhere == {ahead.history.space.baseline}


def test_a_search_that_died_before_its_first_heartbeat_is_freed_too(
    open_at: Callable[..., Search], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = open_at(database)
    with on_another_machine(), monkeypatch.context() as patch:
        dead = open_at(database)
        die(dead)
        patch.setattr(dead.store, "shared", NoBeats())
        begin(dead)
    eventually(lambda: here.store.look().elsewhere == frozenset())


def test_a_trial_that_was_measured_and_not_told_is_told_by_another_search(
    open_at: Callable[..., Search], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_another_machine():
        dead = open_at(database)
        number = begin(dead)
    assert number is not None
    with monkeypatch.context() as patch:
        patch.setattr(dead.store._storage, "set_trial_state_values", lambda *args: None)
        with pytest.raises(AssertionError):  # it is not read back
            finish(dead, number)
    here = open_at(database)
    eventually(lambda: len(here.store.look().trials) == 1)


def test_an_outcome_that_was_written_since_the_trial_was_seen_running_is_told(
    open_at: Callable[..., Search], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = open_at(database)
    with on_another_machine():
        dead = open_at(database)
        number = begin(dead)
    assert number is not None and here.store.look().elsewhere
    die(dead)
    monkeypatch.setattr(dead.store._storage, "set_trial_state_values", lambda *args: None)
    with pytest.raises(AssertionError):  # it is not read back
        finish(dead, number)
    eventually(lambda: len(here.store.look().trials) == 1)


def test_the_outcome_of_a_search_that_was_given_up_is_kept_all_the_same_and_once(
    open_at: Callable[..., Search], database: str
) -> None:
    search = open_at(database)
    number = begin(search)
    assert number is not None
    _, trial_id = search.store._running[number]
    search.store._storage.set_trial_state_values(trial_id, TrialState.FAIL)
    finish(search, number)
    search.store._running[number] = search.store._study, trial_id  # as if it had not learned that this was kept
    finish(search, number)
    assert [trial.number for trial in search.store.trials()] == [number]


def test_one_search_holds_the_play_off_until_it_leaves_it_or_dies(
    open_at: Callable[..., Search], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = open_at(database)
    with on_another_machine():
        other = open_at(database)
        assert other.store.take_play_off() and other.store.take_play_off()
    assert not here.store.take_play_off()
    other.store.leave_play_off()
    assert here.store.take_play_off()
    here.store.leave_play_off()
    with on_another_machine():
        assert other.store.take_play_off()
    die(other)
    eventually(here.store.take_play_off)
    assert (load_study(database).num_running, load_study(database).num_lost) == (0, 0)


def test_a_search_that_stood_still_in_its_play_off_goes_on_with_it_unless_another_holds_it_by_now(
    open_at: Callable[..., Search], database: str
) -> None:
    here, other = open_at(database), open_at(database)
    for freed in (1, 2):
        assert here.store.take_play_off() and here.store._claim is not None
        here.store._storage.set_trial_state_values(here.store._claim, TrialState.FAIL)
        if freed == 1:
            number = begin(here, stage=PLAY_OFF, round=0)
            assert number is not None and here.store.holds_play_off and not other.store.take_play_off()
            finish(here, number)
        else:
            assert other.store.take_play_off()
            assert begin(here, stage=PLAY_OFF, round=1) is None and not here.store.holds_play_off


def test_a_network_that_goes_away_loses_nothing_and_tells_nothing_twice(
    open_at: Callable[..., Search], server: Server, database: str
) -> None:
    network = Network(server.port)
    told: list[str] = []
    search = open_at(database.replace(f":{server.port}/", f":{network.port}/"))
    search.store.tell = told.append
    configs = [config for config in search.history.space if config.batch_size == 4][:6]
    away = threading.Thread(target=network.go_away, args=(2.0,))
    for place, config in enumerate(configs):
        if place == 2:
            away.start()
        number = begin(search, config)
        assert number == place
        finish(search, number)
    away.join()
    network.close()
    assert [trial.config for trial in load_study(database).probes] == configs
    assert load_study(database).num_running == load_study(database).num_lost == 0
    assert told and all("the storage does not answer; it is asked again" in text for text in told)


@pytest.mark.parametrize("cause", [InterfaceError("gone", None, Exception()), PendingRollbackError("cut")])
def test_a_connection_that_is_cut_may_come_again(cause: Exception) -> None:
    error = StorageInternalError()
    error.__cause__ = cause
    assert postgres.Postgres().may_pass(error) and not postgres.Postgres().may_pass(StorageInternalError())


def test_a_storage_that_stays_away_ends_the_search_in_words_without_a_password(
    open_at: Callable[..., Search], server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "PATIENCE_S", 0.5)
    network = Network(server.port)
    search = open_at(database.replace(f":{server.port}/", f":{network.port}/"))
    network.close()
    with pytest.raises(StudyError) as caught, storage_errors(search.store.place):
        begin(search)
    assert "can no longer be read or written" in str(caught.value) and PASSWORD not in str(caught.value)


def test_a_commit_that_the_storage_kept_and_did_not_confirm_is_no_second_trial(
    open_at: Callable[..., Search], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = open_at(database)
    create, failures = search.store._storage.create_new_trial, [1]

    def create_unconfirmed(*args: Any) -> int:
        found = create(*args)
        if failures:
            failures.pop()
            raise StorageInternalError from InterfaceError("gone", None, Exception())
        return found

    monkeypatch.setattr(search.store._storage, "create_new_trial", create_unconfirmed)
    assert begin(search) == 0
    assert load_study(database).num_running == 1


def test_a_lock_that_is_lost_once_its_trial_is_kept_makes_no_second_trial(
    open_at: Callable[..., Search], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, other = open_at(database), open_at(database)
    assert search.store.shared is not None
    alone, failures = search.store.shared.alone, [1]

    @contextlib.contextmanager
    def lost(*args: Any) -> Iterator[None]:
        with alone(*args):
            yield
        if failures:
            failures.pop()
            raise OperationalError("COMMIT", None, Exception("the server is shutting down"))

    with monkeypatch.context() as patch:
        patch.setattr(search.store.shared, "alone", lost)
        assert begin(search) == 0
        failures.append(1)
        assert search.store.take_play_off()
    assert load_study(database).num_running == 1 and not other.store.take_play_off()
    finish(search, 0)
    search.store.leave_play_off()
    assert load_study(database).num_running == 0 and other.store.take_play_off()


def test_of_searches_that_begin_a_config_as_a_lock_is_lost_the_one_whose_lock_held_has_it(
    open_at: Callable[..., Search], server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres.Postgres, "gone_after_s", 60)  # a busy machine keeps living searches from showing it
    search, other = open_at(database), open_at(database)
    create, began = search.store._storage.create_new_trial, []

    def create_without_the_lock(*args: Any) -> int:
        if not began:  # its search has looked, and found that nobody runs the config
            server.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
            with on_another_machine():
                while (number := begin(other)) is None:  # until the server has ended what held the lock
                    time.sleep(0.05)
                began.append(number)
        return create(*args)

    monkeypatch.setattr(search.store._storage, "create_new_trial", create_without_the_lock)
    assert begin(search) is None and began == [0]
    assert load_study(database).num_running == 1
    assert begin(search, [*search.history.space][1]) is not None


def test_searches_that_are_alive_read_no_trial_of_each_other(open_at: Callable[..., Search], database: str) -> None:
    searches = [open_at(database) for _ in range(2)]
    for search, config in zip(searches, searches[0].history.space, strict=False):
        begin(search, config)
    studies = {study._study_id for search in searches for study in search.store._studies()}
    backend, storage = searches[0].store.shared, searches[0].store._storage
    assert backend is not None and backend.all_are_heard(storage, studies)
    die(searches[1])
    eventually(lambda: not backend.all_are_heard(storage, studies))


def test_a_trial_that_another_search_runs_is_read_in_full_once(open_at: Callable[..., Search], database: str) -> None:
    here, other = open_at(database), open_at(database)
    begin(other)
    asked: list[str] = []
    event.listen(
        postgres._database(here.store._storage).engine, "before_cursor_execute", lambda *args: asked.append(args[2])
    )
    for times in (1, 0, 0):
        asked.clear()
        assert here.store.look().elsewhere == {here.history.space.baseline}
        assert sum("FROM trial_user_attributes" in statement for statement in asked) == times


def test_trials_are_kept_as_optuna_keeps_them(open_at: Callable[..., Search], database: str) -> None:
    search = open_at(database)
    space = search.history.space
    configs = [*space][:3]
    assert [begin(search, config) for config in configs] == [0, 1, 2]
    plain = RDBStorage(database)
    kept = plain.get_all_trials(search.store._study._study_id)
    plain.engine.dispose()
    assert [(one.number, one.state) for one in kept] == [(number, TrialState.RUNNING) for number in range(3)]
    assert [one.params for one in kept] == [space.params(config) for config in configs]
    assert all(one.distributions == distributions_of(space) and one.datetime_start is not None for one in kept)
    begun = [BegunTrial.from_dict(one.user_attrs) for one in kept]
    assert [(one.number, Config(tuple(one.config.items()))) for one in begun] == [*enumerate(configs)]


def test_an_earlier_version_is_refused_with_the_way_out(
    open_at: Callable[..., Search], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_at(database)
    monkeypatch.setattr("autotune.study.facts.SHARED_FORMAT", 3)
    with pytest.raises(StudyError, match=r"has format 4, this autotune reads up to 3; .*pip install --upgrade"):
        open_at(database)


def test_tables_of_a_later_optuna_are_refused_with_the_way_out(
    open_at: Callable[..., Search], server: Server, database: str
) -> None:
    open_at(database)
    server.execute("UPDATE alembic_version SET version_num = 'v99.0.0.a'", database.rpartition("/")[2])
    with pytest.raises(StudyError, match=r"pip install -U optuna") as caught:
        open_at(database)
    assert PASSWORD not in str(caught.value)


def test_what_cannot_be_opened_is_named_without_its_password(server: Server) -> None:
    for url in (server.url("nowhere"), server.url("postgres").replace("tester", "stranger")):
        with pytest.raises(StudyError) as caught:
            load_study(url)
        assert "cannot be read" in str(caught.value) and PASSWORD not in str(caught.value)


def test_a_server_without_its_driver_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StudyError, match=r"needs psycopg.*autotune-torch\[postgres\]"):
        load_study("postgresql://me:secret@127.0.0.1:1/db")


def test_reading_an_empty_database_creates_nothing_there(server: Server, database: str) -> None:
    for read in (load_study, open_to_show):
        with pytest.raises(StudyError, match="holds no study yet; `autotune search` makes one"):
            read(database)
    assert not server.execute("SELECT * FROM pg_tables WHERE schemaname = 'public'", database.rpartition("/")[2])
