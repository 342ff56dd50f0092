"""What the command line makes of studies: a page, a comparison, and a check that an answer still holds."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest

from autotune.cli import main
from autotune.study.reading import load_study
from tests.report.sample_study import GLOBAL_BATCH, write_study

MODEL = f"""
import torch

GLOBAL_BATCH = {GLOBAL_BATCH}

def build_model():
    return torch.nn.Linear(8, 3)

def make_batch(n):
    return torch.randn(n, 8), torch.randint(3, (n,))
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write_study(tmp_path / "gpt.db")


def answer_with(study: Path, samples_per_s: float) -> None:
    """Let the study's answer have been so fast."""
    result = load_study(study).answer().to_dict()
    kept = optuna.load_study(study_name="gpt", storage=f"sqlite:///{study}")
    kept.set_user_attr("result", {**result, "samples_per_s": samples_per_s})


def test_a_report_is_a_page_named_after_the_study_or_as_one_says(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(study)]) == 0
    assert capsys.readouterr().out == "gpt.html\n"
    assert main(["report", str(study), "--html", "mine.html"]) == 0
    assert (tmp_path / "mine.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(study), "--html", "nowhere/mine.html"]) == 2
    assert "--html nowhere/mine.html cannot be written" in capsys.readouterr().err


def test_answers_are_compared_as_a_table_or_as_json(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(study), str(study)]) == 0
    assert capsys.readouterr().out.count("faster") == 2
    assert main(["compare", str(study), str(study), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["answers"]) == 2


def test_an_answer_that_has_become_slower_is_told_by_the_exit_code(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    command = ["verify", str(model), "--against", str(study), "--steps", "3", "--device", "cpu"]
    answer_with(study, 0.1)
    assert main(command) == 0
    answer_with(study, 1e12)
    assert main([*command, "--max-regression", "10%"]) == 1
    assert "no longer holds" in capsys.readouterr().err
