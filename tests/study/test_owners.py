"""Trials that were left running: closed where the controller that ran them is gone, and else left alone."""

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

from autotune.records.study import BegunTrial, Owner
from autotune.records.trial import Proposal
from autotune.study import owners
from autotune.study.reading import load_study
from tests.closed_form import ClosedFormRunner, make_search

ROOT = Path(__file__).parent.parent.parent
CONTROLLER = """
import sys, time
from pathlib import Path
from autotune.records.trial import Proposal
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
OTHER = Owner(host=owners.this_process().host, pid=os.getppid(), started=owners._started(os.getppid()))
REUSED = replace(OTHER, started="0 ticks after boot")


@pytest.mark.parametrize(
    ("owner", "silent_s", "state"),
    [
        (OTHER, 10 * owners.GONE_AFTER_S, "RUNNING"),  # the process itself is asked
        (REUSED, 0.0, "FAIL"),
        (ELSEWHERE, owners.GONE_AFTER_S / 2, "RUNNING"),
        (ELSEWHERE, 2 * owners.GONE_AFTER_S, "FAIL"),
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
    monkeypatch.setattr(owners, "BEAT_S", 0.0)
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
