"""The lines that an answer is printed with run what was measured: the search's own task, device, batch and limit."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

import autotune
from tests.short_play_off import AUTOTUNE

pytestmark = pytest.mark.timeout(300)

TINY = (Path(__file__).parent.parent / "models" / "tiny.py").read_text()
OF_LENGTH = TINY.replace(
    "torch.randn(batch_size, 128)", "torch.randn(batch_size, int(os.environ.get('LENGTH', 3)), 128)"
).replace("nn.Linear(128, 10))", "nn.Linear(128, 10), Mean())")
OPTIONS = ("--global-batch", "96", "--device", "cpu", "--memory-limit", "3GiB")
TWICE = """
import os
import autotune
class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)
task = autotune.Task(build_model=build_model, make_batch=make_batch, global_batch=GLOBAL_BATCH, baseline=BASELINE)
"""


def run(*arguments: str, cwd: Path) -> str:
    command = [*AUTOTUNE, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A search of a task in a file, of twice its global batch: its folder, what it printed, what `show` printed."""
    folder = tmp_path_factory.mktemp("run-it")
    (folder / "tiny.py").write_text(OF_LENGTH + TWICE)
    printed = run("search", "tiny.py:task", *OPTIONS, "--trials", "2", "--budget", "1m", cwd=folder)
    return folder, printed, run("show", "studies/tiny.db", cwd=folder)


def test_the_printed_lines_prepare_what_was_measured(
    shown: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, *texts = shown
    monkeypatch.chdir(folder)
    for text in texts:
        config = text[text.index("config = {") : text.index("}") + 1]
        prepare = text[text.index("session = autotune.prepare(") : text.index("for batch in")]
        found: dict[str, object] = {"autotune": autotune}
        exec(f"{config}\n{prepare}", found)
        session = found["session"]
        assert isinstance(session, autotune.Session)
        assert (session.config.samples_per_step, session.task.name, session.device.type) == (96, "tiny", "cpu")


def test_the_printed_command_verifies_what_was_measured(shown: tuple[Path, str, str]) -> None:
    folder, *texts = shown
    command, again = (line for text in texts for line in text.splitlines() if line.startswith("  autotune verify"))
    assert command == again
    words = shlex.split(command)
    assert words[2] == "tiny.py:task"
    assert words[-6:] == ["--device", "cpu", "--memory-limit", "3GiB", "--global-batch", "96"]
    outcome = json.loads(run(*words[1:], "--json", cwd=folder))
    assert outcome["kind"] == "ok" and outcome["measurement"]["num_steps"] >= 100


def test_a_search_that_goes_on_with_other_sizes_from_the_environment_is_refused(
    shown: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LENGTH", "5")
    command = [*AUTOTUNE, "search", "tiny.py:task", *OPTIONS, "--budget", "1m"]
    done = subprocess.run(command, cwd=shown[0], capture_output=True, text=True, timeout=290)
    assert done.returncode == 2
    assert "batch was ['float32 (2, 3, 128)'] and is ['float32 (2, 5, 128)'" in done.stderr
