"""What a storage does wrong, as its user is told."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import StudyError
from autotune.records.study import SearchFacts
from autotune.study.place import place_of
from autotune.study.storage import storage_errors
from autotune.study.store import Store


def test_a_locked_database_is_the_users_to_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    def connect_impatiently(*args: Any, **options: Any) -> sqlite3.Connection:
        return connect(*args, **options | {"timeout": 0.1})

    monkeypatch.setattr(sqlite3.dbapi2, "connect", connect_impatiently)
    place = place_of(str(tmp_path / "gpt.db"), None, "gpt")
    store = Store(place, SearchFacts())
    other = connect(tmp_path / "gpt.db")
    other.execute("BEGIN EXCLUSIVE")
    for use in (lambda: store.keep(no_answer="none"), lambda: Store(place, SearchFacts())):
        with pytest.raises(StudyError) as caught, storage_errors(place):
            use()
        assert str(tmp_path / "gpt.db") in str(caught.value) and "database is locked" in str(caught.value)
    other.close()
