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
