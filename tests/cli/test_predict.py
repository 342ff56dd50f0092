"""`autotune predict`: what fits into a memory, without a GPU and without training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main

TINY = Path(__file__).parent.parent / "models" / "tiny.py"
UNTRACEABLE = """
def training_step(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x[y.nonzero()[:, 0]]), y[y.nonzero()[:, 0]])
"""


def predict(folder: Path, *arguments: str, model: Path = TINY) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune", "predict", str(model), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=115)


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def on_t4(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return predict(tmp_path_factory.mktemp("t4"), "--gpu", "T4", "--json")


def test_the_table_is_of_the_techniques_that_the_card_supports(on_t4: subprocess.CompletedProcess[str]) -> None:
    assert on_t4.returncode == 0, on_t4.stderr
    found = document(on_t4)
    assert (found["predicted"], found["device"], found["on_gpu"]) == (True, "T4 16GB", True)
    combinations = [c for group in found["groups"] for c in (group["switched_on"], *group["same_memory"])]
    assert {c.get("amp", "off") for c in combinations} == {"off", "fp16"}
    assert {c.get("optimizer_impl", "default") for c in combinations} == {"default", "for-loop", "fused"}
    assert found["left_out"]["amp"] == "bf16 needs compute capability 8.0, this GPU has 7.5"
    assert found["untraced"] == {}


def test_every_row_is_the_largest_batch_that_keeps_the_global_batch(on_t4: subprocess.CompletedProcess[str]) -> None:
    for group in document(on_t4)["groups"]:
        peak = group["peak"]
        assert (peak["config"]["batch_size"], peak["config"]["accumulation_steps"]) == (48, 1)
        assert group["fits"] and group["bounded"]
        assert peak["peak_low_bytes"] < peak["peak_bytes"] < peak["peak_high_bytes"]
        assert peak["parameters_bytes"] == 4 * (4 * (128 * 128 + 128) + 128 * 10 + 10)


def test_stderr_tells_what_was_done_and_for_how_long(on_t4: subprocess.CompletedProcess[str]) -> None:
    assert "combinations of techniques in " in on_t4.stderr
    assert "nothing was trained" in on_t4.stderr


def test_without_a_card_it_is_for_this_machine(tmp_path: Path) -> None:
    done = predict(tmp_path, "--device", "cpu", "--memory-limit", "2GiB", "--config", '{"batch_size": 16}')
    assert done.returncode == 0, done.stderr
    assert "what fits within 2.00 GiB, 5% of it kept free" in " ".join(done.stdout.split())
    assert "Fits:" in done.stdout and "batch 16 x3" in done.stdout


def test_a_config_that_does_not_fit_has_its_own_exit_code(tmp_path: Path) -> None:
    done = predict(tmp_path, "--gpu", "1GiB", "--memory-limit", "300MiB", "--config", '{"batch_size": 16}', "--json")
    assert done.returncode == 1, done.stderr
    found = document(done)
    assert (found["fits"], found["groups"], found["config"]["outside_bytes"] > 300 * 2**20) == (False, [], True)


def test_where_nothing_can_be_written_it_predicts_all_the_same_and_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "studies").write_text("no folder")
    done = predict(tmp_path, "--gpu", "24GiB", "--config", '{"batch_size": 16}')
    assert done.returncode == 0 and "Fits:" in done.stdout, done.stderr
    (note,) = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert note == "note: nothing is kept, as studies cannot be written: Not a directory"
    assert [path.name for path in tmp_path.iterdir()] == ["studies"]


@pytest.mark.slow  # `test_explain.py` shows the reason
def test_a_model_that_cannot_be_traced_says_why_and_what_to_do(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(TINY.read_text() + UNTRACEABLE)
    done = predict(tmp_path, "--gpu", "24GiB", "--config", '{"batch_size": 16}', model=model)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonzero" in done.stderr and "depends on the values of a tensor" in done.stderr
    assert "`autotune search` learns it from probes instead" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--gpu", "RTX 409"), "the nearest names are RTX 4090"),
        (("--gpu", "A100"), "A100 80GB or A100 40GB"),
        (("--gpu", "24GiB", "--device", "cpu"), "contradict each other"),
        (("--gpu", "24GiB", "--config", '{"batch_size": 5}'), "does not divide the global batch 48"),
        (("--gpu", "24GiB", "--headroom", "200%"), "not a share"),
    ],
)
def test_bad_options_are_refused_with_the_next_step(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(TINY), *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and expected in told.err and "Traceback" not in told.err
