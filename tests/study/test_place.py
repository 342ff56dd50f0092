"""Where a study is kept, and who may write to it. A trial that was left running is closed where the controller that ran it is gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.errors import StudyError
from autotune.records.study import BegunTrial, Owner, Proposal
from autotune.study import place, store
from autotune.study.facts import stored_facts
from autotune.study.place import lock_study, place_of, shown_of
from autotune.study.reading import load_study
from tests.closed_form import ClosedFormRunner, make_search

SERVER = "mysql+pymysql://host/autotune"


@pytest.mark.parametrize("storage", ["some.db", SERVER])
def test_one_search_writes_to_a_study_at_a_time(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = place_of(storage, None, "gpt")
    with (
        lock_study(place),
        pytest.raises(StudyError, match=r"gpt|some\.db.* in use by another search"),
        lock_study(place),
    ):
        pass
    with lock_study(place):
        pass


@pytest.mark.parametrize("url", ["sqlite:///some.db", "sqlite:///some.db?timeout=60", "sqlite+pysqlite:///some.db"])
def test_a_file_has_one_lock_however_its_url_is_written(url: str) -> None:
    with (
        lock_study(place_of("some.db", None, "gpt")),
        pytest.raises(StudyError, match=r"some\.db is in use by another search"),
        lock_study(place_of(url, None, "gpt")),
    ):
        pass


@pytest.mark.parametrize(
    ("storage", "file"),
    [
        ("sqlite:///some.db?timeout=60", "some.db"),
        ("sqlite+pysqlite:///some.db", "some.db"),
        ("lr? {x} 100%41.db", "lr? {x} 100%41.db"),
    ],
)
def test_a_study_is_found_again_by_its_storage(storage: str, file: str, tmp_path: Path) -> None:
    search = make_search(tmp_path, ClosedFormRunner(), storage=storage)
    search.probe(Proposal(config=search.history.space.baseline))
    place = place_of(storage, None, "closed")
    assert place.file is not None and place.file.absolute() == Path(file).absolute()
    assert place.file.exists() and stored_facts(place) is not None
    for given in (place.storage, load_study(place.storage).url, file, shown_of(place.storage)):
        assert len(load_study(given).probes) == 1


def test_studies_of_one_server_are_locked_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with lock_study(place_of(SERVER, "one", "gpt")), lock_study(place_of(SERVER, "other", "gpt")):
        pass


def test_what_lives_in_memory_is_nobody_elses() -> None:
    place = place_of("sqlite:///:memory:", None, "gpt")
    with lock_study(place), lock_study(place):
        pass


def test_a_lock_that_was_let_go_leaves_nothing_behind(tmp_path: Path) -> None:
    new, old = tmp_path / "studies", tmp_path / "mine"
    old.mkdir()
    for folder in (new, old):
        with lock_study(place_of(str(folder / "gpt.db"), None, "gpt")):
            assert len(list(folder.iterdir())) == 1
    assert list(tmp_path.iterdir()) == [old] and not list(old.iterdir())


def test_tasks_of_one_name_have_studies_of_their_own_in_one_file() -> None:
    one, other = (place_of(None, None, "Net", version) for version in ("1a", "2b"))
    assert one.file == other.file == Path("studies/Net.db").absolute()
    assert (one.study, other.study, place_of(None, "mine", "Net", "1a").study) == ("Net 1a", "Net 2b", "mine")


@pytest.mark.parametrize("study", ["studies/x", "x.db", "studies/x.db"])
def test_a_path_where_a_name_belongs_is_refused_with_both(study: str) -> None:
    with pytest.raises(StudyError, match=r"'x', which is kept in studies/x.db, or a file as --storage FILE"):
        place_of(None, study, "gpt")
    assert place_of(SERVER, study, "gpt").study == study


ROOT = Path(__file__).parent.parent.parent
CONTROLLER = """
import sys, time
from pathlib import Path
from autotune.records.study import Proposal
from tests.closed_form import ClosedFormRunner, make_search

search = make_search(Path(sys.argv[1]), ClosedFormRunner())
search.store.begin(Proposal(config=search.history.space.baseline), None, search.history.space)
print("runs", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def controller(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun a trial of the study in `folder`, and runs it."""
    command = [sys.executable, "-c", CONTROLLER, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "runs\n"
            yield process
        finally:
            process.kill()


def states(folder: Path) -> list[str]:
    """How the trials stand, once a search has opened the study."""
    make_search(folder, ClosedFormRunner())
    return [trial.state.name for trial in study(folder).trials]


def study(folder: Path) -> optuna.Study:
    return optuna.load_study(study_name="closed", storage=f"sqlite:///{folder / 'closed.db'}")


def test_the_trial_of_a_controller_that_was_killed_is_closed_and_that_of_a_living_one_is_left_alone(
    tmp_path: Path,
) -> None:
    with controller(tmp_path) as process:
        assert states(tmp_path) == ["RUNNING"]
        process.kill()
        process.wait()
        assert states(tmp_path) == ["FAIL"]
    found = load_study(tmp_path / "closed.db")
    assert (found.num_running, found.num_lost) == (0, 1)


def test_a_controller_that_was_killed_and_that_nobody_has_waited_for_is_gone(tmp_path: Path) -> None:
    with controller(tmp_path) as process:
        process.kill()
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert states(tmp_path) == ["FAIL"]


def test_a_search_counts_on_after_the_trial_of_a_living_controller(tmp_path: Path) -> None:
    with controller(tmp_path):
        search = make_search(tmp_path, ClosedFormRunner())
        number = search.store.begin(Proposal(config=search.history.space.baseline), None, search.history.space)
        assert number == 1


ELSEWHERE = Owner(host="elsewhere", pid=1, started="0 ticks after boot")
OTHER = Owner(host=place.this_process().host, pid=os.getppid(), started=place._started(os.getppid()))
REUSED = replace(OTHER, started="0 ticks after boot")


@pytest.mark.parametrize(
    ("owner", "silent_s", "state"),
    [
        (OTHER, 10 * place.GONE_AFTER_S, "RUNNING"),  # the process itself is asked
        (REUSED, 0.0, "FAIL"),
        (ELSEWHERE, place.GONE_AFTER_S / 2, "RUNNING"),
        (ELSEWHERE, 2 * place.GONE_AFTER_S, "FAIL"),
    ],
)
def test_a_process_is_asked_here_and_its_signs_of_life_count_elsewhere(
    tmp_path: Path, owner: Owner, silent_s: float, state: str
) -> None:
    begun(tmp_path, owner=owner.to_dict(), seen_at_s=time.time() - silent_s)
    assert states(tmp_path) == [state]


def test_a_trial_of_an_older_version_says_nothing_of_its_owner_and_is_closed(tmp_path: Path) -> None:
    begun(tmp_path, owner=None)
    assert states(tmp_path) == ["FAIL"]


def begun(folder: Path, **attributes: Any) -> None:
    """Leave a trial running, with these attributes in place of its own."""
    search = make_search(folder, ClosedFormRunner())
    search.store.begin(Proposal(config=search.history.space.baseline), None, search.history.space)
    (trial,) = study(folder).trials
    for key, value in attributes.items():
        study(folder)._storage.set_trial_user_attr(trial._trial_id, key, value)


def test_a_controller_gives_signs_of_life_while_a_probe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BEAT_S", 0.0)
    seen_s = []

    class Waiting(ClosedFormRunner):
        looks = 3

        def collect(self, timeout_s: float | None = None) -> Any:
            if not self.looks:
                return super().collect(timeout_s)
            self.looks -= 1
            seen_s.append(BegunTrial.from_dict(study(tmp_path).trials[0].user_attrs).seen_at_s)
            return None

    search = make_search(tmp_path, Waiting())
    search.probe(Proposal(config=search.history.space.baseline))
    assert seen_s == sorted(set(seen_s)) and len(seen_s) == 3
