"""`autotune search --command`: a script tuned by its own arguments, from the first probe to the line to paste."""

import json
import subprocess
import sys

import pytest

from autotune.cli import main
from tests.short_play_off import AUTOTUNE

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import argparse, time
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--accumulate", type=int)
parser.add_argument("--fast", action="store_true")
given = parser.parse_args()
model = torch.nn.Linear(16, 2)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    for _ in range(given.accumulate):
        time.sleep(0.02 if given.fast else 0.1)
        model(torch.randn(given.batch, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LINE = f"{sys.executable} script.py --batch {{batch_size}} --accumulate {{accumulation_steps}} {{speed}}"
SEARCH = [
    "--choices",
    "speed:slow=,fast=--fast",
    "--global-batch",
    "8",
    "--device",
    "cpu",
    "--fix",
    "batch_size=8",
    "--probe-timeout",
    "60s",
]


def run(*arguments, cwd):
    command = [*AUTOTUNE, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=290)


def search(line, *arguments, cwd):
    return run("search", "--command", line, *SEARCH, *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    (folder / "script.py").write_text(SCRIPT)
    done = search(LINE, "--baseline", "batch_size=8", "--budget", "240s", "--trials", "2", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_the_answer_is_a_command_line_ready_to_paste(answered):
    _, result = answered
    assert result["config"] == {"batch_size": 8, "accumulation_steps": 1, "speed": "fast"}
    assert result["command"] == f"{sys.executable} script.py --batch 8 --accumulate 1 --fast"
    assert result["verdict"] == "faster" and result["speedup"] > 2
    assert result["baseline"]["config"] == {"batch_size": 8, "accumulation_steps": 1, "speed": "slow"}


def test_the_answer_says_that_no_gradients_were_compared(answered):
    _, result = answered
    assert not result["checks"]
    assert any("gradients were not compared" in warning for warning in result["warnings"])


def test_the_study_shows_the_command_and_the_probes_leave_nothing_beside_it(answered):
    folder, result = answered
    shown = run("show", "script", cwd=folder)
    assert shown.returncode == 0 and result["command"] in shown.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["script.py", "studies"]


@pytest.mark.parametrize(
    "arguments",
    [("export", "script", "--to", "transformers"), ("verify", "script.py", "--against", "script", "--steps", "5")],
)
def test_what_needs_a_task_refuses_with_the_command(answered, arguments, monkeypatch, capsys):
    folder, result = answered
    monkeypatch.chdir(folder)
    assert main(arguments) == 2 and result["command"] in capsys.readouterr().err


@pytest.mark.slow
def test_another_command_is_another_study_and_the_same_one_goes_on(answered):
    folder, _ = answered
    other = search(LINE.replace("script.py", "-u script.py"), cwd=folder)
    assert other.returncode == 2 and "task" in other.stderr
    again = search(LINE, "--budget", "30s", cwd=folder)
    assert again.returncode == 0 and "--fast" in again.stdout, again.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "MODEL"),
        (("model.py", "--choices", "a:b=c"), "--command"),
        (("model.py", "--command", "python train.py {batch_size}"), "two things"),
        (("--command", "python train.py {batch_size}", "--choices", "a"), "NAME:CHOICE=TEXT"),
    ],
)
def test_a_search_is_of_one_thing(tmp_path, arguments, said):
    done = run("search", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr
