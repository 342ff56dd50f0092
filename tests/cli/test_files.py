"""No output takes the place of a file that the command reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.cli import main
from tests.report.sample_study import answer, but, write_study


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("mine = 1\n")
    (tmp_path / "train.py").write_text("mine = 1\n")
    return tmp_path


def refused(arguments: list[str], file: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(file).read_bytes()
    assert main([*arguments, file]) == 2
    assert f"{arguments[-1]} {file} is {what} itself; expected another file" in capsys.readouterr().err
    assert Path(file).read_bytes() == before


@pytest.mark.parametrize("named", ["model.py", "model.py:mine"])
@pytest.mark.parametrize("command", [["report", "gpt.db", "--html"], ["export", "gpt.db", "--to", "json", "--out"]])
def test_what_is_made_of_a_study_does_not_replace_its_model_nor_itself(
    here: Path, named: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(here / "gpt.db", result=lambda storage: but(answer(storage), model=named))
    refused(command, "model.py", "the model file", capsys)
    refused(command, "gpt.db", "the study", capsys)


def test_what_is_made_of_a_commands_study_does_not_replace_its_script(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "python train.py --batch 8"
    write_study(here / "gpt.db", result=lambda storage: but(answer(storage), model="", command=line))
    refused(["report", "gpt.db", "--html"], "train.py", "a file of the command", capsys)


def test_a_searchs_answer_does_not_replace_its_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "python train.py --batch {batch_size}"
    refused(["search", "--command", line, "--out"], "train.py", "a file of the command", capsys)


def test_a_replays_answer_does_not_replace_its_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "table.csv").write_text("not read\n")
    refused(["search", "model.py", "--replay", "table.csv", "--out"], "table.csv", "the table", capsys)
