"""Models of which plain training does not fit at micro batch 1: techniques alone make them train, with the global batch kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parent.parent / "models"


def told(*words: str) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "autotune", *words, "--json"], env=environment, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "share"), [("language_32k", 0.9), ("deep_residual", 0.75)])
def test_a_model_that_does_not_fit_at_micro_batch_1_is_trained_by_techniques(
    tmp_path: Path, model: str, share: float
) -> None:
    path = str(MODELS / f"{model}.py")
    plain = told("probe", path, "--config", '{"batch_size": 1}')["measurement"]
    limit_bytes = str(int(share * plain["peak_bytes"]))
    storage = f"sqlite:///{tmp_path}/study.db"
    found = told("search", path, "--memory-limit", limit_bytes, "--budget", "150s", "--storage", storage, "--quiet")
    config = found["config"]
    assert config["batch_size"] * config["accumulation_steps"] == 8
    assert found["peak_bytes"] <= float(limit_bytes)
    again = told("probe", path, "--config", json.dumps({"batch_size": 1}), "--memory-limit", limit_bytes)
    assert again["kind"] == "oom"
