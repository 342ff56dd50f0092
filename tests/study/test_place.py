"""Where a study is kept, and who may write to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import StudyError
from autotune.study.place import lock_study, place_of

SERVER = "postgresql://host/autotune"


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
