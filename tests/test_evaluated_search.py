"""A whole search that also finds the batch size for evaluation: real processes, a real memory limit."""

import json
from pathlib import Path

import pytest

import autotune
from autotune.export import export
from autotune.report.study import study_sections
from autotune.report.terminal import as_text
from autotune.study.reading import load_study
from tests.room import limit_bytes

pytestmark = pytest.mark.usefixtures("short_play_off")
DEEP = Path(__file__).parent / "models" / "deep.py"


@pytest.mark.slow  # two searches; `runners/test_evaluate.py` and `tuning/test_rankings.py` hold its parts
def test_evaluation_takes_larger_batches_than_training_within_the_same_limit_and_is_measured_once(tmp_path):
    limit = limit_bytes(150)
    options = {
        "memory_limit": limit,
        "storage": str(tmp_path / "deep.db"),
        "budget": "1m",
        "fix": {"batch_size": 8, "amp": "off", "checkpoint_segments": 0, "optimizer_impl": "default"},
    }
    result = autotune.search(DEEP, **options)  # which asks for it
    found = result.evaluation
    assert found.eval_batch_size > result.config["batch_size"] == 8
    assert all(one.peak_bytes <= limit for one in found.tried if one.kind == "ok")

    study = load_study(tmp_path / "deep.db")
    assert study.result.evaluation == found
    assert f"batch_size={found.eval_batch_size})" in as_text(study_sections(study), width=120)
    told = json.loads(export(study.result, "transformers").text)
    assert told["per_device_eval_batch_size"] == found.eval_batch_size

    again = autotune.search(DEEP, **options).evaluation
    assert again.tried[: len(found.tried)] == found.tried
    assert found.unfinished or again == found
