"""Importing a study starts no threads, so that its probes can be forked."""

from __future__ import annotations

from pathlib import Path

from tests.new_threads import count_new_threads

STUDIES = Path(__file__).parents[2] / "studies"


def test_importing_a_study_starts_no_threads() -> None:
    done = count_new_threads(STUDIES.glob("*/model.py"))
    assert done.returncode == 0, done.stderr
