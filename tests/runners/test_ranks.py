"""A probe of several ranks: whatever happens to one of them, the outcome names it, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.records.check import Check
from autotune.records.config import Config, ProbeSettings, World
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import CheckJob, ProbeJob
from autotune.runners.local import LocalRunner
from autotune.runners.ranks import Pace
from autotune.runners.runner import ProbeFault
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.processes import find_children, is_alive
from tests.room import limit_bytes

MODEL = """
import ctypes, os, pathlib, signal, time
import torch
from torch import distributed, nn


def build_model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)], nn.Linear(64, 10))


def make_batch(n):
    return torch.randn(n, 64), torch.randint(10, (n,))


steps = 0


def training_step(model, batch):
    global steps
    steps += 1
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    if len(batch[0]) == 32:  # all samples of a comparison, which rank 0 trains on alone
        raise ValueError("no such word")
    if len(batch[0]) == 48:
        time.sleep(1000)
    if len(batch[0]) in (13, 14) and distributed.get_rank() == 1:
        time.sleep(0.05 if len(batch[0]) == 13 else 0.7)
    if steps == 4 and distributed.is_initialized() and distributed.get_rank() == 1:
        pathlib.Path(__file__).with_name("began").write_text(str(time.monotonic()))
        match len(batch[0]):
            case 3:
                torch.empty(2**44)
            case 5:
                os.kill(os.getpid(), signal.SIGKILL)
            case 6:
                raise ValueError("no such word")
            case 7:
                loss = loss * float("nan")
            case 9:
                time.sleep(1000)
            case 10:
                os._exit(0)
            case 11:
                ctypes.PyDLL(None).sleep(1000)  # no other thread of Python runs meanwhile
    return loss
"""
CONTROLLER = """
import pathlib, sys
from tests.runners.test_ranks import ProbeJob, SETTINGS, complete, open_runner

with open_runner(pathlib.Path(sys.argv[1]), "others") as runner:
    runner.run(ProbeJob(config=complete(9), settings=SETTINGS.replace(world=runner.world, timeout_s=60)))
"""
ROOT = str(Path(__file__).parent.parent.parent)
HANGING = MODEL.splitlines().index("                time.sleep(1000)") + 1
FAULTS = {  # samples of a rank -> what becomes of the probe
    "out of memory": (3, Kind.OOM, "rank 1: an allocation of 64.0 TiB failed"),
    "killed": (5, Kind.CRASHED, "rank 1: died of SIGKILL"),
    "an error": (6, Kind.ERROR, "rank 1: ValueError: no such word"),
    "not finite": (7, Kind.NONFINITE, "the loss of rank 1 was nan by optimizer step 3"),
    "hangs": (9, Kind.TIMEOUT, f"; the others waited for rank 1 (net.py, line {HANGING})"),
    "hangs and lets no other thread run": (11, Kind.TIMEOUT, "; the others waited for rank 1, which gives no answer"),
    "ends": (10, Kind.CRASHED, "rank 1: exited with status 0"),
}
TIMEOUT_S = 4.0  # of a probe that hangs
SETTINGS = ProbeSettings(memory_limit_bytes=limit_bytes(800), max_timed_s=0.3, max_warmup_s=0.3, timeout_s=20)
techniques = find_techniques()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    (made / "net.py").write_text(MODEL)
    return made


def open_runner(folder: Path, logs: str) -> LocalRunner:
    return LocalRunner(TaskSource.of(folder / "net.py"), devices="cpu:2", logs=folder / logs)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[LocalRunner]:
    with open_runner(folder, "logs") as running:
        yield running


def complete(batch_size: int, **choices: Any) -> Config:
    return techniques.complete({"batch_size": batch_size, **choices}, world=World(size=2))


def ranks() -> list[psutil.Process]:
    """Those that run now: children of a supervisor, which is this process's own, as those of other tests and their servers may be."""
    found: list[psutil.Process] = []
    for child in find_children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += find_children(child) if child.name() != "postgres" else []
    return [rank for rank in found if is_alive(rank)]


def traces() -> set[str]:
    """What is left outside of processes: shared memory but that of other tests' servers, and ports of this process's descendants."""
    others = ("played.", "PostgreSQL.")
    found = {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(others)}
    for process in find_children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found |= {f"port {one.laddr.port}" for one in process.net_connections("inet") if one.status == "LISTEN"}
    return found


def left_since(before: set[str]) -> list[str]:
    """The traces that were not there `before`, and the ranks; what other tests hold for a moment is given time to go."""
    deadline = time.monotonic() + 5
    while (left := [*(traces() - before), *map(str, ranks())]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def row(name: str, outcome: str, sentence: str, seconds: float, left: list[str]) -> str:
    """A line of the table of faults."""
    return f"| {name} | {outcome} | {sentence} | {seconds:.1f} s | {', '.join(left) or 'nothing'} |"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not ranks()


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp", "fsdp_grad"])
def test_ranks_measure_together(runner: LocalRunner, parallel: str) -> None:
    outcome = runner.probe(complete(2, parallel=parallel), SETTINGS.replace(world=runner.world))
    measured = outcome.measurement
    assert measured is not None, outcome
    assert outcome.world.size == 2
    assert measured.samples_per_s == pytest.approx(4 / measured.step_s)  # of both together
    copies = parallel in ("ddp", "zero1")  # shards have no clocks of their own
    assert len(measured.waits_s) == 2 * copies
    assert ({"imbalance", "communication"} <= measured.phases_s.keys()) is copies


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_what_ranks_wait_for_the_slowest_is_a_phase(runner: LocalRunner, accumulation_steps: int) -> None:
    config = complete(13, accumulation_steps=accumulation_steps)
    outcome = runner.probe(config, SETTINGS.replace(world=runner.world))
    measured = outcome.measurement
    assert measured is not None, outcome
    first_s, last_s = measured.waits_s
    imbalance_s = measured.phases_s["imbalance"]
    assert imbalance_s == pytest.approx(accumulation_steps * (first_s - last_s))
    assert imbalance_s == pytest.approx(measured.step_s, rel=0.5)  # the other rank does little beside


@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_to_one_rank_ends_all_and_is_told_with_its_number(
    runner: LocalRunner, folder: Path, name: str
) -> None:
    batch_size, kind, cause = FAULTS[name]
    settings = SETTINGS.replace(world=runner.world, timeout_s=TIMEOUT_S if kind is Kind.TIMEOUT else 40)
    before, began_s = traces(), time.monotonic()
    outcome = runner.probe(complete(batch_size), settings)
    known_s = began_s + TIMEOUT_S if kind is Kind.TIMEOUT else float((folder / "began").read_text())
    left = left_since(before)
    print(row(name, outcome.kind, outcome.cause, time.monotonic() - known_s, left))  # shown by `pytest -rP`
    assert outcome.kind is kind, outcome
    assert cause in outcome.cause
    assert outcome.wall_s < 30  # a minute is what the others would wait
    assert not left


def test_who_takes_far_longer_than_ever_before_is_stuck() -> None:
    pace = Pace()
    for begun, now_s in ((-1, 0.0), (0, 5.0), (1, 50.0), (2, 50.2), (5, 51.4), (6, 51.6)):
        pace.look(begun, now_s)
    assert not pace.is_stuck(51.6 + 1.2)
    assert pace.is_stuck(51.6 + 3.0)
    pace.look(7, 54.6)
    assert not pace.is_stuck(54.6 + 3.0)


def test_a_rank_that_is_slow_at_every_step_is_not_taken_for_one_that_hangs(runner: LocalRunner) -> None:
    outcome = runner.probe(complete(14), SETTINGS.replace(world=runner.world, timeout_s=2.5))
    assert outcome.kind is Kind.TIMEOUT
    assert outcome.waited_for == ""


def test_one_process_is_probed_by_the_same_runner(runner: LocalRunner) -> None:
    outcome = runner.run(ProbeJob(config=techniques.complete({"batch_size": 3}), settings=SETTINGS))
    assert outcome.kind is Kind.OK  # alone there is no rank 1


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_ranks_are_compared_with_one_process(runner: LocalRunner, parallel: str) -> None:
    settings = SETTINGS.replace(world=runner.world)
    check = runner.run(CheckJob(config=complete(2, parallel=parallel), settings=settings, batch_size=8))
    assert isinstance(check, Check), check
    assert check.passed, check
    assert check.gradient_error < 1e-5
    assert check.num_samples == 8
    assert "2 processes on 8 samples were compared with one process; parameters after 3 steps differ by" in check.reason


PLAIN_FAULTS = {  # samples of the comparison -> what becomes of it
    "an error": (32, Kind.ERROR, "rank 0: ValueError: no such word"),
    "hangs": (48, Kind.TIMEOUT, "; the others waited for rank 0 (net.py, line "),
}


@pytest.mark.parametrize("name", PLAIN_FAULTS)
def test_what_happens_while_rank_0_trains_plainly_ends_all(runner: LocalRunner, name: str) -> None:
    num_samples, kind, cause = PLAIN_FAULTS[name]
    settings = SETTINGS.replace(world=runner.world, timeout_s=TIMEOUT_S if kind is Kind.TIMEOUT else 40)
    job = CheckJob(config=complete(2, parallel="fsdp"), settings=settings, batch_size=num_samples)
    before, began_s = traces(), time.monotonic()
    outcome = runner.run(job)
    left = left_since(before)
    assert isinstance(outcome, Outcome), outcome
    print(row(f"rank 0 alone: {name}", outcome.kind, outcome.cause, time.monotonic() - began_s, left))
    assert outcome.kind is kind, outcome
    assert cause in outcome.cause
    assert not left


def wait_for(begun: Path) -> None:
    deadline = time.monotonic() + 60
    while not begun.exists():
        assert time.monotonic() < deadline, "the ranks did not begin"
        time.sleep(0.05)


def seconds_until_gone(killed: int, running: list[psutil.Process]) -> float:
    assert len(running) == 2
    began_s = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    while any(map(is_alive, running)):
        assert time.monotonic() < began_s + 5, "they run on"
        time.sleep(0.01)
    return time.monotonic() - began_s


def test_a_controller_that_dies_takes_its_ranks_with_it_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    began = folder / "began"
    began.unlink(missing_ok=True)
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(folder)], env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": ROOT}
    )
    wait_for(began)
    (supervisor,) = psutil.Process(controller.pid).children()
    gone_s = seconds_until_gone(controller.pid, supervisor.children())
    controller.wait()
    _, alive = psutil.wait_procs([supervisor], timeout=5)
    left = [str(process) for process in alive] + [path.name for path in tmp_path.glob("autotune-*")]
    print(row("controller killed", "", "", gone_s, left))
    assert not left


def test_a_supervisor_that_dies_takes_its_ranks_with_it(runner: LocalRunner, folder: Path) -> None:
    began = folder / "began"
    began.unlink(missing_ok=True)
    runner.submit(ProbeJob(config=complete(9), settings=SETTINGS.replace(world=runner.world, timeout_s=60)))
    wait_for(began)
    (supervisor,) = {rank.parent() for rank in ranks()}
    gone_s = seconds_until_gone(supervisor.pid, supervisor.children())
    with pytest.raises(ProbeFault, match=r"the process that starts probes failed: died of SIGKILL") as raised:
        runner.collect()
    print(row("supervisor killed", "", str(raised.value), gone_s, []))
