"""What the command line starts before it imports what does the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from autotune import cli
from autotune.cli import commands


@pytest.mark.parametrize(
    ("given", "is_ahead"),
    [
        (["search", "net.py"], True),
        (["search", "net.py", "--devices", "1,2"], True),
        (["probe", "net.py", "--config", "c.json"], True),
        (["search", "net.py", "--replay", "table.jsonl"], False),
        (["search", "--command", "python train.py --batch {batch_size}"], False),
        (["search", "net.py", "--slots", "auto"], False),
        (["search", "net.py", "--runner", "ray"], False),
        (["show", "study.db"], False),
    ],
)
def test_what_trains_a_model_file_here_starts_while_the_command_imports(
    monkeypatch: pytest.MonkeyPatch, given: list[str], is_ahead: bool
) -> None:
    begun = []

    @contextlib.contextmanager
    def begin() -> Iterator[None]:
        begun.append(True)
        yield

    monkeypatch.setattr(cli, "started_ahead", begin)
    monkeypatch.setattr(commands, given[0], lambda options: 0)
    assert cli.main(given) == 0
    assert bool(begun) is is_ahead
