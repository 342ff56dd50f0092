"""The notebook that inspects a study shows what it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")

from tests.notebooks import executed
from tests.report.sample_study import ANSWER, BASELINE, add_probe, measured, without_a_gain, write_study


def run(study: Path) -> list[dict[str, Any]]:
    """What the notebook shows of a study, cell by cell."""
    notebook = executed("inspect_study", {"AUTOTUNE_STUDY": str(study)})
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(write_study(tmp_path_factory.mktemp("notebook") / "gpt.db"))


def _printed(outputs: list[dict[str, Any]]) -> str:
    return " ".join("".join(output["text"] for output in outputs if output.get("name") == "stdout").split())


def _shown(outputs: list[dict[str, Any]], kind: str) -> list[str]:
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


def test_it_shows_the_probes_as_a_table_with_the_varied_techniques_and_the_outcomes(
    outputs: list[dict[str, Any]],
) -> None:
    study, probes, outcomes, *_ = _shown(outputs, "text/html")
    assert "Faster: 1.7" in study
    assert all(word in probes for word in ("checkpoint_segments", "samples_per_s", "play-off", "proposed by gp"))
    assert all(word in outcomes for word in ("oom", "timeout", "crashed", "nonfinite", "the loss is nan"))


def test_it_draws_the_front_and_the_throughput_over_the_batch_size(outputs: list[dict[str, Any]]) -> None:
    assert len(_shown(outputs, "image/png")) == 2


def test_it_shows_the_recommended_config_and_its_gain(outputs: list[dict[str, Any]]) -> None:
    assert any(f"'batch_size': {ANSWER.batch_size}" in text for text in _shown(outputs, "text/plain"))
    assert "Faster: 1.73x the baseline's throughput" in _printed(outputs)
    assert any("speed_ratio" in table and "bf16" in table for table in _shown(outputs, "text/html"))


@pytest.mark.slow  # another kernel, for two sentences
def test_a_study_without_a_gain_says_why_there_is_little_to_see(tmp_path: Path) -> None:
    outputs = run(_one_config(tmp_path / "gpt.db"))
    printed = _printed(outputs)
    assert "One config is the whole front: nothing else that ran was faster, or took less memory." in printed
    assert "Keep what you have" in printed and "There is no effect to show: the answer changes nothing." in printed


@pytest.mark.slow  # another kernel, for one sentence
def test_a_study_without_an_answer_says_why(tmp_path: Path) -> None:
    printed = _printed(run(write_study(tmp_path / "gpt.db", with_result=False)))
    assert "No answer yet" in printed and "There is no effect to show: there is no answer." in printed


def _one_config(file: Path) -> Path:
    """A study in which only the baseline ran."""
    write_study(file, with_probes=False, result=without_a_gain)
    add_probe(file, BASELINE, measured(BASELINE), stage="baseline", reason="what you run today")
    return file
