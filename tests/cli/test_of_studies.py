"""What the command line makes of studies: a page, a comparison, and a check that an answer still holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

from autotune import api
from autotune.cli import main
from autotune.devices import open_device
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.recheck import Recheck, Rechecks
from autotune.study.reading import load_study
from autotune.tuning import later
from tests.report.sample_study import GLOBAL_BATCH, answer, but, without_a_gain, write_study

MODEL = f"""
import torch

GLOBAL_BATCH = {GLOBAL_BATCH}

def build_model():
    return torch.nn.Linear(8, 3)

def make_batch(n):
    return torch.randn(n, 8), torch.randint(3, (n,))
"""


CPU = f"cpu {open_device('cpu').info().model}"  # as in a fingerprint


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write_study(tmp_path / "gpt.db")


def answer_with(study: Path, samples_per_s: float, **asked: int) -> None:
    """Let the study's answer have been so fast, and asked for so."""
    result = load_study(study, study="gpt").answer().to_dict()
    kept = optuna.load_study(study_name="gpt", storage=f"sqlite:///{study}")
    kept.set_user_attr("result", {**result, "samples_per_s": samples_per_s, "asked": asked})


def searched_with(study: Path, **known: str | int) -> None:
    """Let the study have that in its fingerprint: the hash of its task's code, its device."""
    kept = optuna.load_study(study_name="gpt", storage=f"sqlite:///{study}")
    kept.set_user_attr("fingerprint", {**kept.user_attrs["fingerprint"], **known})


def test_a_report_is_a_page_named_after_the_study_or_as_one_says(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(study)]) == 0
    assert capsys.readouterr() == ("gpt.html\n", "")
    assert main(["report", str(study), "--html", "mine.html"]) == 0
    assert (tmp_path / "mine.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(study), "--html", "nowhere/mine.html"]) == 2
    assert "--html nowhere/mine.html cannot be written" in capsys.readouterr().err


def test_without_matplotlib_the_page_is_written_without_pictures_and_says_how_to_get_them(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(study), "--html", "page.html"]) == 0
    told = capsys.readouterr()
    assert told.out == "page.html\n"
    assert "the page has no pictures: matplotlib" in told.err and "pip install 'autotune-torch[report]'" in told.err
    assert main(["show", str(study), "--html"]) == 0
    shown = capsys.readouterr()
    assert shown.out == Path("page.html").read_text() and shown.err == told.err
    assert "No pictures: matplotlib" in shown.out and "Faster: 1.7" in shown.out and "<script" not in shown.out


def test_answers_are_compared_as_a_table_or_as_json(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(study), str(study)]) == 0
    assert capsys.readouterr().out.count("faster") == 2
    assert main(["compare", str(study), str(study), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["answers"]) == 2


@pytest.mark.parametrize(
    "words",
    [["show", "STUDY"], ["show", "STUDY", "--html"], ["show", "STUDY", "--json"], ["export", "STUDY", "--to", "torch"]],
)
def test_a_stdout_that_lacks_characters_is_no_fault(words: list[str], tmp_path: Path) -> None:
    name = "größtes 模型"
    study = write_study(tmp_path / "gpt.db", name=name, result=lambda url: but(answer(url), study=name))
    command = [sys.executable, "-m", "autotune", *(str(study) if word == "STUDY" else word for word in words)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    if "--json" in words:
        assert json.loads(done.stdout)["study"] == name
    else:
        assert "gr??tes ??" in done.stdout


@pytest.mark.parametrize("words", [["compare", "STUDY", "STUDY"], ["export", "STUDY", "--to", "env"]])
def test_an_earlier_answer_is_used_with_a_note_that_the_last_search_found_none(
    words: list[str], study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = optuna.load_study(study_name="gpt", storage=f"sqlite:///{study}")
    kept.set_user_attr("no_answer", "everything ran out of memory")
    assert main([str(study) if word == "STUDY" else word for word in words]) == 0
    said = "note: the answer of gpt is an earlier search's; the last one found none: everything ran out of memory"
    assert said in capsys.readouterr().err.splitlines()


def test_each_file_has_a_study_of_its_own_name(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(study, name="bert", with_probes=False)
    other = write_study(tmp_path / "vit.db", name="vit", with_probes=False)
    named = [word for name in ("gpt", "bert", "vit") for word in ("--study", name)]
    assert main(["compare", str(study), str(study), str(other), *named]) == 0
    configs = capsys.readouterr().out.partition("Configs")[2]
    assert all(f"{name}: " in configs for name in ("gpt", "bert", "vit"))
    assert main(["compare", str(study), str(study), str(other), *named[2:]]) == 2
    assert "--study was given 2 times for 3 files" in capsys.readouterr().err


def test_an_answer_that_has_become_slower_is_told_by_the_exit_code(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_remembered() -> int:
        (file,) = tmp_path.glob(".rechecks/*")
        return len(Rechecks.from_dict(json.loads(file.read_text())).rechecks)

    monkeypatch.setattr(later, "undisturbed", list)  # this machine may be busy
    model = tmp_path / "model.py"
    write_study(study, name="other", with_probes=False)
    command = ["verify", str(model), "--against", str(study), "--study", "gpt", "--steps", "3", "--device", "cpu"]
    answer_with(study, 0.1, global_batch=GLOBAL_BATCH)
    searched_with(study, device=CPU)
    model.write_text(MODEL.replace(f"GLOBAL_BATCH = {GLOBAL_BATCH}", f"GLOBAL_BATCH = {GLOBAL_BATCH // 2}"))
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert [line[:11] for line in printed.err.splitlines() if line.startswith("run ")] == [
        f"run {n} of 4:" for n in range(1, 5)
    ]
    holds, seen = told["finding"]
    assert holds.startswith("The answer of gpt holds: ") and "expected at least 0.095 (0.1 less 5%)" in holds
    assert seen.startswith("In turns with the baseline, at ") and "The study told 1.73x (95% interval " in seen
    assert "holds" not in printed.err and "in turns" not in printed.err
    (kept,) = load_study(study, study="gpt").facts.rechecks
    assert Recheck.from_dict(told["recheck"]) == kept
    assert kept.told_samples_per_s == 0.1
    assert num_remembered() == 1
    assert told["holds"] and told["expected_samples_per_s"] == pytest.approx(0.095)
    searched_with(study, task="other code")
    assert main(command) == 0
    assert "another task than the study's, or its code has changed" in capsys.readouterr().err
    assert len(load_study(study, study="gpt").facts.rechecks) == 1 == num_remembered()
    answer_with(study, 1e12, global_batch=GLOBAL_BATCH)
    assert main([*command, "--max-regression", "10%"]) == 1
    printed = capsys.readouterr()
    assert "The answer of gpt " in printed.out and "answer of gpt" not in printed.err


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"device": "cuda:0 NVIDIA H200"}, f"device cuda:0 NVIDIA H200 there and {CPU} here"),
        ({"device": CPU, "num_threads": 1000}, "number of threads 1000 there and "),
        ({"device": CPU, "num_processes": 4}, "number of processes 4 there and 1 here"),
    ],
)
def test_a_run_on_another_device_than_the_studys_says_nothing_of_its_answer_and_is_not_kept(
    study: Path,
    tmp_path: Path,
    known: dict[str, str | int],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(later, "undisturbed", list)  # this machine may be busy
    (tmp_path / "model.py").write_text(MODEL)
    answer_with(study, 1e12, global_batch=GLOBAL_BATCH)
    searched_with(study, **known)
    asked = ["verify", str(tmp_path / "model.py"), "--against", str(study), "--steps", "2", "--device", "cpu"]
    assert main(asked) == 1
    printed = capsys.readouterr()
    said, found = printed.err, " ".join(printed.out.split())
    assert (
        f"the study was not searched on this device: {told}" in said
        and "so what is seen of the gain is not kept" in said
    )
    assert "was not reached on another device than the study's" in found and "no longer holds" not in found
    assert not load_study(study, study="gpt").facts.rechecks and not list(tmp_path.glob(".rechecks/*"))


def test_of_a_kept_baseline_too_it_is_told_that_its_code_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "gpt.db", result=lambda url: but(without_a_gain(url), speedup_ci=None))
    (tmp_path / "model.py").write_text(MODEL)
    answer_with(study, 0.1, global_batch=GLOBAL_BATCH)
    searched_with(study, device=CPU, task="other code")
    asked = ["verify", str(tmp_path / "model.py"), "--against", str(study), "--steps", "2", "--device", "cpu"]
    assert main(asked) == 0
    assert "this is another task than the study's, or its code has changed\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("disturbances", "told"),
    [((), "no longer holds"), (("others held the processor for 57% of the time",), "verify it on a quiet machine")],
)
def test_an_answer_is_not_said_to_be_outdated_by_a_run_that_other_work_disturbed(
    study: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    disturbances: tuple[str, ...],
    told: str,
) -> None:
    def slow(*args: object, **asked: object) -> tuple[Outcome, None, str]:
        found = Measurement(
            samples_per_s=1.0,
            samples_per_s_low=0.9,
            samples_per_s_high=1.1,
            step_s=1.0,
            peak_bytes=2**20,
            block_samples_per_s=(1.0,),
            num_steps=3,
            setup_s=0.1,
            warmup_s=0.1,
            timed_s=3.0,
            disturbances=disturbances,
        )
        return Outcome(kind=Kind.OK, measurement=found), None, ""

    monkeypatch.setattr(api, "verify_answer", slow)
    answer_with(study, 1e12, global_batch=GLOBAL_BATCH)
    assert main(["verify", "model.py", "--against", str(study), "--steps", "3"]) == 1
    printed = capsys.readouterr()
    assert told in " ".join(printed.out.split()) and told not in printed.err


def test_what_is_asked_of_a_study_needs_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "model.py", "--config", "{}", "--steps", "3", "--max-regression", "10%"]) == 2
    assert "--against STUDY" in capsys.readouterr().err
