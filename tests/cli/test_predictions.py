"""What a search predicts of its probes, and what it does where nothing can be predicted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from autotune.techniques import find_techniques
from tests.short_play_off import AUTOTUNE

techniques = find_techniques()

pytestmark = pytest.mark.usefixtures("measured_once")

GOOD = (Path(__file__).parent.parent / "models" / "steady.py").read_text()
UNTRACEABLE = """

def training_step(model, batch):
    time.sleep(0.02)
    x, y = batch
    chosen = (y >= 0).nonzero().squeeze(1)  # how many there are depends on the values
    return nn.functional.cross_entropy(model(x[chosen]), y[chosen])
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*AUTOTUNE, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)


def search(folder: Path, text: str, *options: str, budget: str = "40s") -> subprocess.CompletedProcess[str]:
    (folder / "model.py").write_text(text)
    common = ("--device", "cpu", "--budget", budget, "--trials", "3", "--storage", "study.db")
    done = run(folder, "search", "model.py", *common, *options)
    assert done.returncode == 0, done.stderr
    return done


# one config and its batch size: the search ends once that is traced, and a twentieth of its budget is enough for it
ALONE = ["--fix=batch_size=4", *(f"--exclude={name}" for name in techniques)]


def test_each_probe_tells_what_was_predicted_beside_what_it_found(tmp_path: Path) -> None:
    done = search(tmp_path, GOOD)
    probes = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert all(" [expected " in line for line in probes if " search " in line)
    assert any("samples/s, " in line and "to win]" in line for line in probes)
    study = json.loads(run(tmp_path, "show", "study.db", "--json").stdout)
    searched = [probe for probe in study["probes"] if probe["stage"] == "search"]
    assert searched and all(probe["prediction"]["peak_bytes"] > 10**8 for probe in searched)
    assert "expected" in run(tmp_path, "show", "study.db").stdout


def test_traces_are_kept_for_the_next_search_of_the_task(tmp_path: Path) -> None:
    done = search(tmp_path, GOOD, *ALONE, budget="300s")
    assert "predicted the memory of" in done.stderr
    assert len(list((tmp_path / ".traces").glob("*.json"))) == 1


def test_a_model_that_cannot_be_traced_is_searched_by_its_probes_alone(tmp_path: Path) -> None:
    done = search(tmp_path, GOOD + UNTRACEABLE, budget="20s")
    probes = [line for line in done.stderr.splitlines() if line.startswith("[") and " search " in line]
    assert probes and all("[expected " in line for line in probes)


def test_that_a_model_cannot_be_traced_is_said_once(tmp_path: Path) -> None:
    done = search(tmp_path, GOOD + UNTRACEABLE, *ALONE, budget="300s")
    told = "memory cannot be traced: what aten.nonzero.default returns depends on the values of a tensor"
    assert done.stderr.count(told) == 1 and done.stderr.count("traced") == 1
