"""Where a study is kept, and who may write to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import StudyError
from autotune.study.place import locked, place_of

SERVER = "postgresql://host/autotune"


@pytest.mark.parametrize("storage", ["some.db", SERVER])
def test_one_search_writes_to_a_study_at_a_time(storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = place_of(storage, None, "gpt")
    with locked(place), pytest.raises(StudyError, match=r"gpt|some\.db.* in use by another search"), locked(place):
        pass
    with locked(place):
        pass


def test_studies_of_one_server_are_locked_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with locked(place_of(SERVER, "one", "gpt")), locked(place_of(SERVER, "other", "gpt")):
        pass


def test_what_lives_in_memory_is_nobody_elses() -> None:
    place = place_of("sqlite:///:memory:", None, "gpt")
    with locked(place), locked(place):
        pass


def test_a_lock_that_was_let_go_leaves_nothing_behind(tmp_path: Path) -> None:
    new, old = tmp_path / "studies", tmp_path / "mine"
    old.mkdir()
    for folder in (new, old):
        with locked(place_of(str(folder / "gpt.db"), None, "gpt")):
            assert len(list(folder.iterdir())) == 1
    assert list(tmp_path.iterdir()) == [old] and not list(old.iterdir())
