"""What a study keeps beside its trials, for whoever has not opened it."""

from __future__ import annotations

from pathlib import Path

from autotune.study.facts import stored_facts
from autotune.study.place import place_of


def test_the_attributes_of_no_study_are_none(tmp_path: Path) -> None:
    assert stored_facts(place_of(str(tmp_path / "none.db"), None, "none")) is None
    assert not (tmp_path / "none.db").exists()
