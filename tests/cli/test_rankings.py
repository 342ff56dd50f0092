"""What else a task may train is ranked by itself, and nothing is chosen among the rankings."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import autotune
from tests.short_play_off import AUTOTUNE

pytestmark = pytest.mark.timeout(300)

MODEL = Path(__file__).parent.parent / "models" / "variants.py"
OPTIONS = ("--device", "cpu", "--trials", "2")
PARAMETERS = {"base": 64 * 128 + 128 + 3 * (128 * 128 + 128) + 1290, "small": 64 * 32 + 32 + 3 * (32 * 32 + 32) + 330}


def run(*arguments: str, cwd: Path) -> str:
    command = [*AUTOTUNE, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A search of two architectures, and of the first with its first layer frozen."""
    folder = tmp_path_factory.mktemp("rankings")
    shutil.copy(MODEL, folder)
    options = (*OPTIONS, "--include", "freeze", "--budget", "80s", "--eval", "--json")
    return folder, json.loads(run("search", "variants.py", *options, cwd=folder))


def test_the_users_own_comes_first_and_is_the_answer(searched: tuple[Path, dict[str, Any]]) -> None:
    _, result = searched
    own, *others = result["rankings"]
    assert [r["choice"] for r in result["rankings"]] == [
        {"variant": "base", "freeze": "none"},
        {"variant": "small", "freeze": "none"},
        {"variant": "base", "freeze": "0"},
    ]
    assert (own["config"], own["samples_per_s"], own["study"]) == (
        result["config"],
        result["samples_per_s"],
        "variants",
    )
    assert [other["study"] for other in others] == ["variants variant=small", "variants freeze=0"]


def test_each_has_its_own_config_parameters_and_gain(searched: tuple[Path, dict[str, Any]]) -> None:
    for ranking in searched[1]["rankings"]:
        if ranking["failure"].startswith("the budget was spent"):  # a busy machine
            continue
        assert not ranking["failure"] and ranking["choice"].items() <= ranking["config"].items()
        assert (
            ranking["samples_per_s"] > 0 and ranking["peak_bytes"] > 0 and ranking["speedup"] > 0 and ranking["verdict"]
        )
        frozen = 64 * 128 + 128 if ranking["choice"]["freeze"] == "0" else 0
        assert ranking["num_parameters"] == PARAMETERS[ranking["choice"]["variant"]]
        assert ranking["num_trainable"] == ranking["num_parameters"] - frozen


def test_each_has_its_own_batch_size_for_evaluation(searched: tuple[Path, dict[str, Any]]) -> None:
    for ranking in searched[1]["rankings"]:
        if not ranking["failure"]:
            found = ranking["evaluation"]
            assert found["unfinished"] or found["eval_batch_size"] >= 1


def test_the_study_shows_them_and_each_is_a_study(searched: tuple[Path, dict[str, Any]]) -> None:
    folder, result = searched
    shown = " ".join(run("show", "studies/variants.db", cwd=folder).split())
    assert "their accuracy was not compared: none is the winner" in shown and "variant small," in shown
    small = autotune.load_study(folder / "studies" / "variants.db", study="variants variant=small")
    assert small.result is not None and small.result.config == result["rankings"][1]["config"]
    assert {probe.config["variant"] for probe in small.probes} == {"small"}


def test_every_command_takes_a_config_that_says_what_is_trained(searched: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = searched
    config = {"batch_size": 4, "variant": "small", "freeze": "0"}  # few samples: the peak is where all gradients are
    session = autotune.prepare(folder / "variants.py", config, device="cpu")
    trainable = sum(p.numel() for p in session.model.parameters() if p.requires_grad)
    assert trainable == PARAMETERS["small"] - 64 * 32 - 32
    given = ("variants.py", "--config", json.dumps(config), "--device", "cpu", "--json")
    assert json.loads(run("verify", *given, "--steps", "5", cwd=folder))["kind"] == "ok"
    predicted = json.loads(run("predict", *given, cwd=folder))["config"]
    # gradients and two moments of what is trained, beside the parameters of all
    assert predicted["gradients_bytes"] == 4 * trainable and predicted["optimizer_bytes"] >= 8 * trainable
    assert predicted["parameters_bytes"] == 4 * PARAMETERS["small"]


@pytest.mark.slow  # five commands
def test_one_alone_is_searched_swept_and_replayed(searched: tuple[Path, dict[str, Any]]) -> None:
    """The search goes on with the study of the ranking. What the file's baseline trains is no other."""
    folder, _ = searched
    base = ("--fix", "variant=base", "--fix", "freeze=none", "--budget", "10s", "--json")
    assert json.loads(run("search", "variants.py", *OPTIONS, *base, cwd=folder))["study"] == "variants"
    options = (*OPTIONS, "--budget", "10s", "--fix", "variant=small", "--json")
    alone = json.loads(run("search", "variants.py", *options, cwd=folder))
    assert (alone["study"], alone["config"]["variant"], alone["rankings"]) == ("variants variant=small", "small", [])
    names = ("amp", "checkpoint_segments", "inplace_activations", "optimizer_impl")
    grid = (
        "--grid",
        "variant=small",
        "--grid",
        "batch_size=4,48",
        *(word for name in names for word in ("--exclude", name)),
    )
    run("sweep", "variants.py", "--out", "small.csv", *grid, "--max-repeats", "1", "--device", "cpu", cwd=folder)
    replayed = json.loads(run("search", "variants.py", "--replay", "small.csv", "--json", cwd=folder))
    assert replayed["config"]["variant"] == "small" and replayed["rankings"] == []
