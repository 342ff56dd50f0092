"""What a search predicts of its probes, and what it does where nothing can be predicted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from autotune.techniques import find_techniques
from tests.short_play_off import AUTOTUNE

techniques = find_techniques()

pytestmark = [pytest.mark.usefixtures("measured_once"), pytest.mark.timeout(300)]

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
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=290)


def search(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A search that its trials end."""
    (folder / "model.py").write_text(text)
    common = ("--device", "cpu", "--budget", "2m", "--trials", "3", "--storage", "study.db")
    done = run(folder, "search", "model.py", *common, *options)
    assert done.returncode == 0, done.stderr
    return done


# few configs, of one trace
OF_ONE = ["--fix=batch_size=4", *(f"--exclude={name}" for name in techniques if name != "optimizer_impl")]


def test_each_probe_tells_what_was_predicted_beside_what_it_found_and_traces_are_kept(tmp_path: Path) -> None:
    done = search(tmp_path, GOOD)
    probes = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert all(" [expected " in line for line in probes if " search " in line)
    assert any("samples/s, " in line and "to win]" in line for line in probes)
    study = json.loads(run(tmp_path, "show", "study.db", "--json").stdout)
    searched = [probe for probe in study["probes"] if probe["stage"] == "search"]
    assert searched and all(probe["prediction"]["peak_bytes"] > 10**8 for probe in searched)
    assert "expected" in run(tmp_path, "show", "study.db").stdout
    assert "predicted the memory of" in done.stderr and list((tmp_path / ".traces").glob("*.json"))


def test_a_model_that_cannot_be_traced_is_searched_by_its_probes_alone_and_it_is_said_once(tmp_path: Path) -> None:
    done = search(tmp_path, GOOD + UNTRACEABLE, *OF_ONE)
    probes = [line for line in done.stderr.splitlines() if line.startswith("[") and " search " in line]
    assert probes and all("[expected " in line for line in probes)
    told = "memory cannot be traced: what aten.nonzero.default returns depends on the values of a tensor"
    assert done.stderr.count(told) == 1 and done.stderr.count("traced") == 1
