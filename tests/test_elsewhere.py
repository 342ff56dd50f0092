"""On macOS and Windows everything works that trains nothing, and what trains says what it needs.

On Linux the package is shown a system without Linux's facilities, by `elsewhere/sitecustomize.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.records.outcome import Kind
from autotune.runners.jobs import InspectJob, JobFailed
from autotune.runners.portable import PortableRunner
from autotune.task.source import TaskSource
from tests.report.sample_study import write_study

HERE = Path(__file__).parent
TINY = HERE / "models" / "tiny.py"
COMMANDS = (
    ["show", "gpt.db"],
    ["show", "gpt.db", "--json"],
    ["show", "gpt.db", "--csv"],
    ["report", "gpt.db", "--html", "gpt.html"],
    ["compare", "gpt.db", "gpt.db", "--json"],
    ["export", "gpt.db", "--to", "transformers"],
    ["export", "gpt.db", "--to", "yaml", "--out", "gpt.yaml"],
    ["devices", "--json"],
    ["completion", "zsh"],
    ["init", "new.py"],
)
RUN_ALL = """
import contextlib, io, json, sys
import autotune
from autotune.cli import main
for command in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(command)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


@pytest.fixture(params=["darwin", "win32"])
def elsewhere(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a process there."""
    if sys.platform != "linux":
        if sys.platform != request.param:
            pytest.skip("this is another system")
        return dict(os.environ)
    path = os.pathsep.join([str(HERE / "elsewhere"), str(HERE.parent)])
    return os.environ | {"LOOKS_LIKE": request.param, "PYTHONPATH": path, "PYTHONWARNDEFAULTENCODING": "1"}


def run_all(commands: Any, cwd: Path, environment: dict[str, str]) -> list[tuple[int, str, str]]:
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(commands),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("elsewhere", [pytest.param("darwin", marks=pytest.mark.slow), "win32"], indirect=True)
def test_a_study_is_shown_reported_compared_and_exported(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    write_study(tmp_path / "gpt.db")
    done = run_all(COMMANDS, tmp_path, elsewhere)
    assert [code for code, _, _ in done] == [0] * len(COMMANDS), [err for code, _, err in done if code]
    shown, as_json, as_csv, _, compared, exported, _, devices, *_ = (out for _, out, _ in done)
    assert "Faster" in shown and json.loads(as_json)["result"] and as_csv.startswith("number,")
    assert len(json.loads(compared)["answers"]) == 2 and json.loads(exported)["per_device_train_batch_size"]
    assert json.loads(devices)["devices"][-1]["total_bytes"] > 0
    assert "Faster" in (tmp_path / "gpt.html").read_text(encoding="utf-8") and (tmp_path / "gpt.yaml").exists()


@pytest.mark.parametrize("elsewhere", ["win32"], indirect=True)  # which has the least
def test_what_fits_is_predicted(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    [(code, predicted, error)] = run_all([["predict", str(TINY), "--config", "{}", "--json"]], tmp_path, elsewhere)
    assert code == 0 and json.loads(predicted)["config"], error


def test_an_inspection_that_takes_too_long_is_ended_and_says_so(tmp_path: Path) -> None:
    with (
        PortableRunner(TaskSource.of(TINY), device="cpu", logs=tmp_path / "logs") as runner,
        pytest.raises(JobFailed, match="killed after 100 ms, during setup") as failed,
    ):
        runner.run(InspectJob(memory_limit_bytes=None, timeout_s=0.1))
    assert failed.value.outcome.kind is Kind.TIMEOUT


@pytest.mark.slow
def test_memory_is_explained(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    [(code, explained, error)] = run_all([["explain", str(TINY), "--gpu", "80GiB", "--json"]], tmp_path, elsewhere)
    assert code == 0 and json.loads(explained)["memory"]["peak_bytes"] > 0, error


@pytest.mark.parametrize(
    "command", [["search", str(TINY)], ["probe", str(TINY), "--config", "{}"], ["explain", str(TINY)], ["doctor"]]
)
def test_what_trains_says_what_it_needs(command: list[str], tmp_path: Path, elsewhere: dict[str, str]) -> None:
    [(code, out, error)] = run_all([command], tmp_path, elsewhere)
    assert (code, out) == (2, "")
    assert "by facilities of Linux that this system" in error and "autotune predict" in error
    assert "Traceback" not in error and not list(tmp_path.iterdir())
