"""Searches that are ended, by the user or from outside: what they say, what they leave, and that the next one goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

import psutil
import pytest

import autotune
from autotune import api
from autotune.cli import main
from autotune.records.result import Result
from autotune.tuning.recommend import Interrupted
from tests.report.sample_study import answer
from tests.short_play_off import AUTOTUNE

pytestmark = pytest.mark.usefixtures("measured_once")

TINY = Path(__file__).parent.parent / "models" / "tiny.py"
THREAD = "\nimport threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n"
HANGS = """
import pathlib, time

GLOBAL_BATCH = None  # else the whole batch is tried before the search, and hangs there
HANGING = pathlib.Path(__file__).with_name("hanging")

def training_step(model, batch):
    if len(batch[0]) > 4:
        HANGING.touch()
        time.sleep(3600)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""

RANK_HANGS = """
import pathlib, time
import torch
from torch import distributed, nn

GLOBAL_BATCH = 16
BASELINE = {"batch_size": 8}
HANGING = pathlib.Path(__file__).with_name("hanging")
steps = 0


def build_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_batch(n):
    return torch.randn(n, 64), torch.randint(10, (n,))


def training_step(model, batch):
    global steps
    steps += 1
    if steps == 4 and distributed.is_initialized() and distributed.get_rank() == 1:
        HANGING.touch()
        time.sleep(3600)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


def begin(folder: Path, model: str, *options: str) -> subprocess.Popen[str]:
    """A search that runs."""
    command = [*AUTOTUNE, "search", model, "--device", "cpu", "--json", *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_until(text: str, stream: IO[str] | None) -> None:
    assert stream is not None
    assert any(text in line for line in stream)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_after_kill_9_the_same_command_goes_on_and_no_process_is_left(tmp_path: Path) -> None:
    shutil.copy(TINY, tmp_path)
    process = begin(tmp_path, "tiny.py", "--budget", "40s", "--memory-limit", "2GiB")
    read_until("#2", process.stderr)
    kill(process)
    deadline = time.monotonic() + 10
    while supervisors_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not supervisors_of(tmp_path)
    before = len(autotune.load_study(tmp_path / "studies" / "tiny.db").frame())
    again = begin(tmp_path, "tiny.py", "--budget", "1m", "--trials", "1", "--memory-limit", "2GiB")
    out, told = again.communicate(timeout=100)
    assert again.returncode == 0, told
    after = autotune.load_study(tmp_path / "studies" / "tiny.db")
    assert before >= 2
    assert json.loads(out)["probes"] >= before - 1
    assert after.num_running == 0 and len(after.frame()) >= before


def supervisors_of(folder: Path) -> list[str]:
    found = subprocess.run(
        ["pgrep", "-f", f"autotune.runners.supervisor.*{folder.name}"], capture_output=True, text=True
    )
    return found.stdout.split()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_the_first_interrupt_is_acknowledged_and_ends_after_the_running_probe_with_the_best_so_far(
    tmp_path: Path, number: signal.Signals
) -> None:
    shutil.copy(TINY, tmp_path)
    process = begin(tmp_path, "tiny.py", "--budget", "60s")
    read_until("#1", process.stderr)
    process.send_signal(number)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "ending after this probe; " in told and " again to end now" in told
    result = json.loads(out)
    assert result["confirmed"] is False
    assert result["config"]["batch_size"] * result["config"]["accumulation_steps"] == 48


def test_the_second_interrupt_kills_the_running_probe_and_still_gives_the_best_so_far(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY.read_text() + HANGS)
    process = begin(tmp_path, "tiny.py", "--budget", "60s", "--sampler", "grid", "--probe-timeout", "50s")
    read_until("#0", process.stderr)
    deadline = time.monotonic() + 50
    while not (tmp_path / "hanging").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (tmp_path / "hanging").exists()
    process.send_signal(signal.SIGINT)
    read_until("ending after this probe", process.stderr)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["config"]["batch_size"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_a_search_of_several_processes_ends_with_all_of_them(tmp_path: Path, times: int) -> None:
    (tmp_path / "net.py").write_text(RANK_HANGS)
    (tmp_path / "tmp").mkdir()
    command = [*AUTOTUNE, "search", "net.py", "--devices", "cpu:2", "--budget", "60s"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    searching = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "hanging").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    running = psutil.Process(searching.pid).children(recursive=True)
    for _ in range(times):
        began_s = time.monotonic()
        searching.send_signal(signal.SIGINT)
        time.sleep(0.3)
    told = searching.communicate(timeout=60)[1]
    _, alive = psutil.wait_procs(running, timeout=5)
    left = [str(process) for process in alive] + [path.name for path in (tmp_path / "tmp").glob("autotune-*")]
    print(f"| Ctrl-C {times} x | {told.strip().splitlines()[-1]} | {time.monotonic() - began_s:.1f} s | {left} |")
    assert len(running) >= 3
    assert not left
    assert searching.returncode == 130
    line = RANK_HANGS.splitlines().index("        time.sleep(3600)") + 1
    if times == 1:  # the probe was given up meanwhile
        assert f"; the others waited for rank 1 (net.py, line {line})" in told


@pytest.mark.slow  # the test of `kill -9` holds it for a module without threads
def test_a_dead_search_leaves_no_supervisor_even_when_the_module_keeps_a_thread_alive(tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text(TINY.read_text() + THREAD)
    process = begin(tmp_path, "kept.py", "--budget", "30s")
    read_until("searching", process.stderr)
    supervisors = set(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split())
    kill(process)
    assert supervisors
    deadline = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in supervisors) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in supervisors)


@pytest.mark.parametrize("pressed", [Interrupted(None), KeyboardInterrupt()], ids=["in a search", "as it opens"])
def test_of_several_numbers_of_devices_those_that_have_an_answer_are_told(
    pressed: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [answer("studies/tiny.db")]

    def search(*arguments: object, **options: object) -> Result:
        if not answers:
            raise pressed
        return answers.pop()

    monkeypatch.setattr(api, "run_search", search)
    assert main(["search", str(TINY), "--device", "cpu", "--devices", "1,2", "--json"]) == 130
    assert [row["num_processes"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1]
