"""What is refused where a search opens, and what it says of what breaks."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

import autotune
from autotune.errors import ConfigError, StudyError
from autotune.records.options import SearchOptions
from autotune.runners.replay import ReplayRunner
from autotune.task.source import TaskSource
from autotune.tuning.events import Event, Listener, ProbeEnded
from autotune.tuning.search import search

TINY = Path(__file__).parent.parent / "models" / "tiny.py"


@pytest.mark.parametrize(("option", "value"), [("device", "cpu"), ("devices", "cpu:2"), ("slots", "2")])
def test_a_runner_has_devices_of_its_own(option: str, value: str) -> None:
    gpt = Path(__file__).parent.parent.parent / "studies" / "gpt"
    with pytest.raises(ConfigError, match=f"{option} {value} cannot be chosen: the runner has its own"):
        search(TaskSource.of(gpt / "model.py"), SearchOptions(**{option: value}), runner=ReplayRunner(gpt / "cpu.csv"))


def test_a_storage_that_breaks_in_the_middle_of_a_search_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(TINY, tmp_path)

    class Breaks(Listener):
        def on(self, event: Event) -> None:
            if isinstance(event, ProbeEnded):
                with sqlite3.connect(tmp_path / "studies" / "tiny.db") as database:
                    database.execute("ALTER TABLE trial_user_attributes RENAME TO gone")

    with pytest.raises(StudyError, match=r"studies/tiny.db.*no such table: trial_user_attributes"):
        autotune.search("tiny.py", device="cpu", budget="60s", listeners=[Breaks()])
