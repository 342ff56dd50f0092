"""A study in Optuna's journal, which several searches share without heartbeats."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from optuna.trial import TrialState

from autotune.errors import StudyError
from autotune.records.study import BegunTrial, Proposal
from autotune.study import store
from autotune.study.backends.journal import Journal
from autotune.study.reading import load_study
from autotune.study.storage import storage_errors
from autotune.tuning.state import Search
from tests.closed_form import ClosedFormRunner, make_search
from tests.controllers import controllers

LONGEST_S = 60.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gpt.log"


@pytest.fixture
def open_search(file: Path) -> Iterator[Callable[[], Search]]:
    """Opens searches of one study in the journal, which are closed again."""
    with contextlib.ExitStack() as opened:

        def open_search() -> Search:
            search = make_search(file.parent, ClosedFormRunner(), storage=f"journal:///{file}")
            opened.callback(search.store.close)
            return search

        yield open_search


def begin(search: Search, place: int = 0) -> int:
    """Begin a trial of the space's config at this place."""
    space = search.history.space
    number = search.store.begin(Proposal(config=[*space][place]), None, space)
    assert number is not None
    return number


def finish(search: Search, number: int) -> None:
    outcome = ClosedFormRunner().outcome_of(search.history.space.baseline, search.settings)
    search.store.finish(number, outcome, search.history.objective, disturbed=False)


def probed(file: Path) -> list[int]:
    return [probe.number for probe in load_study(f"journal:///{file}").probes]


@contextlib.contextmanager
def full_disk(file: Path) -> Iterator[None]:
    """No file may become longer than this one is, but for half a line."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_two_searches_share_a_journal_and_say_that_it_keeps_no_heartbeats(tmp_path: Path) -> None:
    url = f"journal:///{tmp_path}/shared/gpt.log"
    with controllers(2, url, sampler="random", num_trials=3, waits=True) as both:
        for one in both:
            one.until("begins")
        for one in both:  # a search that begins once the other has answered may find a better config
            one.go()
        answers = [one.result() for one in both]
        notes = [note for one in both for note in one.notes()]
    assert sum("a journal keeps no heartbeats" in note for note in notes) == 2
    read = load_study(url)
    searched = [probe.config for probe in read.probes if not probe.in_play_off]
    assert len(searched) == len(set(searched)) and (read.num_running, read.num_lost) == (0, 0)
    assert answers[0]["config"] == answers[1]["config"] == read.answer().config


def test_a_journal_that_is_not_there_is_not_made_by_reading_it(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"there is no journal .*gpt\.log"):
        load_study(f"journal:///{tmp_path}/gpt.log")
    assert not (tmp_path / "gpt.log").exists()


def test_a_line_that_a_machine_died_in_takes_no_later_one_with_it(
    file: Path, open_search: Callable[[], Search]
) -> None:
    finish(one := open_search(), begin(one))
    with file.open("ab") as journal:
        journal.write(b'{"op_code":5,"stu')
    other = open_search()
    for place in (1, 2):
        finish(other, begin(other, place))
    assert probed(file) == [0, 1, 2]


def test_a_full_disk_is_named_and_what_others_write_once_it_has_room_is_kept(
    file: Path, open_search: Callable[[], Search]
) -> None:
    one, other = open_search(), open_search()
    told = r"gpt\.log can no longer be read or written: .*File too large.*has room"
    with full_disk(file), pytest.raises(StudyError, match=told), storage_errors(one.store.place):
        begin(one)
    assert not file.read_bytes().endswith(b"\n")
    finish(other, begin(other, 1))
    finish(one, begin(one))
    assert sorted(probed(file)) == [0, 1]


def test_a_search_that_shares_a_journal_outlives_a_file_system_that_is_gone_for_a_moment(
    file: Path, open_search: Callable[[], Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Journal, "beat_s", 0.01)
    search = open_search()
    watch = search.store._watch
    assert watch is not None
    file.rename(away := file.with_suffix(".away"))
    watch._thread.join(0.5)
    away.rename(file)
    assert watch._thread.is_alive()


def test_a_search_that_stood_still_until_another_freed_its_trial_goes_on_and_keeps_the_outcome(
    file: Path, open_search: Callable[[], Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BEAT_S", 0.0)
    one, other = open_search(), open_search()
    number = begin(one)
    (trial_id,) = one.store._own()
    other.store._storage.set_trial_state_values(trial_id, TrialState.FAIL)
    one.store.beat()
    finish(one, number)
    assert probed(file) == [number]


def test_a_search_that_holds_the_play_off_gives_signs_of_life_while_no_probe_runs(
    open_search: Callable[[], Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BEAT_S", 0.0)
    monkeypatch.setattr(Journal, "beat_s", 0.01)
    search = open_search()
    assert search.store.take_play_off()
    (claim,) = search.store._own()

    def seen_at_s() -> float:
        return BegunTrial.from_dict(search.store._storage.get_trial(claim).user_attrs).seen_at_s

    before_s = seen_at_s()
    until_s = time.monotonic() + LONGEST_S
    while seen_at_s() == before_s:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_what_a_search_of_this_process_left_running_is_free_once_that_search_has_ended(
    file: Path, open_search: Callable[[], Search]
) -> None:
    left = open_search()
    begin(left)
    assert left.store.take_play_off()
    assert not open_search().store.take_play_off() and load_study(f"journal:///{file}").num_running == 1
    left.store.close()
    assert open_search().store.take_play_off()
    read = load_study(f"journal:///{file}")
    assert (read.num_running, read.num_lost) == (0, 1)
