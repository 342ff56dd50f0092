"""`autotune priors`: what is remembered, of what, how large; forget one, forget all."""

from __future__ import annotations

import json
from pathlib import Path

import filelock
import pytest

from autotune.cli import main
from autotune.study import priors
from autotune.study.priors import PriorStore
from tests.study.test_priors import left


@pytest.fixture(autouse=True)
def two_studies() -> None:
    """What two searches have left."""
    for study in (left("gpt 1"), left("gpt 2", "2026-02-02")):
        PriorStore(Path("studies")).keep(study)


def test_each_study_is_shown_with_its_model_its_device_and_what_all_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["priors"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("gpt 1", "1.50x", "0.131 M parameters: 8 LayerNorm, 8 Linear; cpu Some Processor; torch 2.13.0"):
        assert words in shown
    assert "2 studies in 3." in shown and "KiB: studies/.priors/" in shown


def test_one_is_forgotten_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["priors", "--forget", "gpt 1", "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == "forgot gpt 1\n"
    assert [study["name"] for study in json.loads(told.out)["studies"]] == ["gpt 2"]
    assert main(["priors", "--forget", "all"]) == 0
    told = capsys.readouterr()
    assert told.err == "forgot gpt 2\n"
    assert "Nothing is remembered" in told.out


def test_after_the_last_was_forgotten_by_its_name_nothing_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gpt 1", "gpt 2"):
        assert main(["priors", "--forget", name]) == 0
    assert "Nothing is remembered" in capsys.readouterr().out
    assert not list(Path("studies/.priors").glob("*.journal"))


def test_a_name_that_is_not_remembered_is_told_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["priors", "--forget", "gpt 3"]) == 2
    assert (
        "'gpt 3' is not remembered in studies/.priors; expected one of 'gpt 2', 'gpt 1', or all"
        in capsys.readouterr().err
    )


def test_a_foreign_file_is_set_aside_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    Path("studies/.priors/foreign.journal").write_text("mine")
    assert main(["priors", "--forget", "all"]) == 0
    assert "foreign.journal is set aside as foreign.aside" in capsys.readouterr().err
    assert Path("studies/.priors/foreign.aside").read_text() == "mine"


def test_while_another_search_writes_that_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(priors, "LOCK_S", 0.1)
    with filelock.FileLock("studies/.priors/lock"):
        assert main(["priors"]) == 0
    told = capsys.readouterr()
    assert "note: another search writes to studies/.priors" in told.err
    assert "Nothing could be read of studies/.priors/" in told.out and "Nothing is remembered" not in told.out
