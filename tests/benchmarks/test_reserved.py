"""Ranks are measured in forks of one process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.benchmarks.reserved import in_forks


def test_forks_run_at_a_time_and_tell_in_their_order(tmp_path: Path) -> None:
    """The first waits for the second."""

    def wait_for_other() -> str:
        while not (tmp_path / "other").exists():
            time.sleep(0.01)
        return "first"

    def come() -> str:
        (tmp_path / "other").touch()
        return "second"

    assert in_forks([wait_for_other, come]) == ["first", "second"]


def test_a_fork_that_fails_ends_the_others(tmp_path: Path) -> None:
    number, waits = tmp_path / "number", tmp_path / "waits"

    def wait_for_ever() -> None:
        number.write_text(str(os.getpid()))
        waits.touch()
        time.sleep(3600)

    def fail() -> None:
        while not waits.exists():
            time.sleep(0.01)
        raise ValueError("no such word")

    with pytest.raises(RuntimeError, match="process 1 of 2 failed"):
        in_forks([wait_for_ever, fail])
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)
