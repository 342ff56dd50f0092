"""Several searches of one task share a study: each in a process of its own, over a closed form, on a real server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.records.options import SearchOptions
from autotune.records.result import Result
from autotune.runners.jobs import InspectJob, Job
from autotune.study.reading import load_study
from autotune.tuning import playoff, together
from autotune.tuning.search import search
from tests.closed_form import ClosedFormRunner, make_search
from tests.controllers import controllers
from tests.postgres import PASSWORD, database, server

__all__ = ["database", "server"]


class Late(ClosedFormRunner):
    """While it inspects, which takes long, another search of the study begins and ends."""

    def __init__(self, meanwhile: Callable[[], Result]) -> None:
        super().__init__(noise=0.01, seed=1)
        self._meanwhile = meanwhile
        self.answers: list[Result] = []

    def result_of(self, job: Job[Any]) -> Any:
        if isinstance(job, InspectJob) and not self.answers:
            self.answers.append(self._meanwhile())
        return super().result_of(job)


def test_a_search_that_comes_after_the_play_off_leaves_with_its_answer(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playoff, "MAX_ROUNDS", playoff.MIN_ROUNDS)
    asked = {
        "storage": database,
        "sampler": "random",
        "budget_s": 60.0,
        "fix": {"amp": "bf16", "checkpoint_segments": 0},
    }
    everything = SearchOptions(**asked, num_trials=12)
    late = Late(lambda: search(None, everything, runner=ClosedFormRunner(noise=0.01, seed=0)))
    answer = search(None, SearchOptions(**asked, num_trials=3, seed=1), runner=late)
    assert answer == replace(late.answers[0], cost=answer.cost)


def test_an_answer_that_no_play_off_has_confirmed_is_nobody_elses(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playoff, "MAX_ROUNDS", playoff.MIN_ROUNDS)
    asked = SearchOptions(storage=database, sampler="random", num_trials=3, budget_s=60.0)

    def leave_without_a_play_off() -> Result:
        with monkeypatch.context() as patch:
            patch.setattr("autotune.tuning.search.confirm", lambda *args, **options: None)
            return search(None, asked, runner=ClosedFormRunner())

    late = Late(leave_without_a_play_off)
    assert search(None, asked, runner=late).play_off.confirmed and not late.answers[0].play_off.confirmed


def test_who_waits_looks_the_less_often_the_longer_it_has_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    looks: list[float] = []
    monkeypatch.setattr(together.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(together.time, "sleep", lambda s: now_s.__setitem__(0, now_s[0] + s))
    waits = make_search(tmp_path, ClosedFormRunner(), budget_s=600.0, interrupted=lambda: now_s[0] >= 300.0)
    monkeypatch.setattr(waits, "catch_up", lambda: looks.append(now_s[0]))
    waiting = together._Waiting(waits)
    while waiting.look():
        pass
    assert looks[0] == together.PAUSE_S and len(looks) < 100
    assert looks[-1] - looks[-2] == pytest.approx(together.LOOK_AT_LEAST_EVERY_S, abs=together.PAUSE_S)


def test_three_searches_that_begin_at_the_same_instant_share_their_probes_and_leave_with_one_answer(
    database: str,
) -> None:
    with controllers(3, database, sampler="random", num_trials=6, waits="opened") as all_three:
        for one in all_three:
            one.until("begins")
        for one in all_three:
            one.go()
        answers = [one.result() for one in all_three]
        notes = [one.notes() for one in all_three]
        said = [one.lines for one in all_three]
    read = load_study(database)
    probed = Counter(probe.config for probe in read.probes if not probe.in_play_off)
    assert max(probed.values()) == 1 and len(probed) > 6
    assert (read.num_running, read.num_lost) == (0, 0)
    assert [probe.number for probe in read.probes] == [*range(len(read.probes))]
    assert all(answer["config"] == read.answer().config for answer in answers)
    assert len({answer["samples_per_s"] for answer in answers}) == 1 and read.answer().play_off.confirmed
    assert sum(any("play-off: " in note for note in told) for told in notes) == 1
    assert PASSWORD not in str(said) and PASSWORD not in str(read.answer().to_dict())
