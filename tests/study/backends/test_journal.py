"""A study in Optuna's journal, which several searches share without heartbeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import StudyError
from autotune.study.reading import load_study
from tests.controllers import controllers


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
