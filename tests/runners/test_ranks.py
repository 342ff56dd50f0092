"""A probe of several ranks: whatever happens to one of them, the outcome names it, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.records.check import Check
from autotune.records.config import Config, ProbeSettings, World
from autotune.records.outcome import Kind
from autotune.runners.jobs import CheckJob, ProbeJob
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.room import limit_bytes

MODEL = """
import os, signal, time
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
    if len(batch[0]) == 11 and distributed.get_rank() == 1:
        time.sleep(0.05)
    if steps == 4 and distributed.is_initialized() and distributed.get_rank() == 1:
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
    return loss
"""
FAULTS = {  # samples of a rank -> what becomes of the probe
    "out of memory": (3, Kind.OOM, "rank 1: "),
    "killed": (5, Kind.CRASHED, "rank 1: died of SIGKILL"),
    "an error": (6, Kind.ERROR, "rank 1: ValueError: no such word"),
    "not finite": (7, Kind.NONFINITE, ""),
    "hangs": (9, Kind.TIMEOUT, "killed after"),
    "ends": (10, Kind.CRASHED, "rank 1"),
}
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
    """Those that run now: children of the supervisor, which is this process's own."""
    return [grandchild for child in psutil.Process().children() for grandchild in child.children()]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not [rank for rank in ranks() if rank.status() != psutil.STATUS_ZOMBIE]


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


def test_what_ranks_wait_for_the_slowest_is_a_phase(runner: LocalRunner) -> None:
    measured = runner.probe(complete(11), SETTINGS.replace(world=runner.world)).measurement
    assert measured is not None
    first_s, last_s = measured.waits_s
    assert first_s - last_s == pytest.approx(measured.phases_s["imbalance"])
    assert first_s > last_s


@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_to_one_rank_ends_all_and_is_told_with_its_number(runner: LocalRunner, name: str) -> None:
    batch_size, kind, cause = FAULTS[name]
    timeout_s = 5 if name == "hangs" else 40
    outcome = runner.probe(complete(batch_size), SETTINGS.replace(world=runner.world, timeout_s=timeout_s))
    assert outcome.kind is kind, outcome
    assert cause in outcome.cause
    assert outcome.wall_s < 30  # a minute is what the others would wait


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
    assert "steps differ by" in check.reason


def test_a_supervisor_that_dies_takes_its_ranks_with_it(folder: Path) -> None:
    before = {process.pid for process in psutil.Process().children()}
    with open_runner(folder, "others") as running:
        running.submit(ProbeJob(config=complete(9), settings=SETTINGS.replace(world=running.world, timeout_s=60)))
        (supervisor,) = [process for process in psutil.Process().children() if process.pid not in before]
        deadline = time.monotonic() + 30
        while len(begun := supervisor.children()) < 2:
            assert time.monotonic() < deadline, "the ranks did not begin"
            time.sleep(0.05)
        os.kill(supervisor.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(begun, timeout=5)
        assert not alive
