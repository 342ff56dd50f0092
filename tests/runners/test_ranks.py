"""A probe of several ranks: whatever happens to one of them, the outcome names it, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autotune.records.check import Check
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import CheckJob, ProbeJob
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.room import limit_bytes

MODEL = """
import os, signal, time
import torch
from torch import distributed, nn

GLOBAL_BATCH = 8


def build_model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)], nn.Linear(64, 10))


def make_batch(n):
    return torch.randn(n, 64), torch.randint(10, (n,))


steps = 0


def training_step(model, batch):
    global steps
    steps += 1
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    if steps == 4 and distributed.is_initialized() and distributed.get_rank() == 1:
        loss = fault(loss)
    return loss


def fault(loss):
    FAULT
    return loss
"""
FAULTS = {
    "out of memory": ("torch.empty(2**44)", Kind.OOM, "rank 1: "),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", Kind.CRASHED, "rank 1: died of SIGKILL"),
    "an error": ("raise ValueError('no such word')", Kind.ERROR, "rank 1: ValueError: no such word"),
    "not finite": ("loss = loss * float('nan')", Kind.NONFINITE, ""),
    "hangs": ("time.sleep(1000)", Kind.TIMEOUT, "killed after"),
    "ends": ("os._exit(0)", Kind.CRASHED, "rank 1"),
}
SETTINGS = ProbeSettings(memory_limit_bytes=limit_bytes(800), max_timed_s=0.3, max_warmup_s=0.3, timeout_s=20)
techniques = find_techniques()


def runner(folder: Path, fault: str = "pass") -> LocalRunner:
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(MODEL.replace("FAULT", fault))
    return LocalRunner(TaskSource.of(folder / "net.py"), devices="cpu:2", logs=folder / "logs")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("parallel", ["ddp", "zero1", "fsdp", "fsdp_grad"])
def test_ranks_measure_together(tmp_path: Path, parallel: str) -> None:
    with runner(tmp_path) as running:
        outcome = running.probe(
            techniques.complete({"batch_size": 2, "parallel": parallel}, global_batch=8, world=running.world),
            SETTINGS.replace(world=running.world),
        )
    measured = outcome.measurement
    assert measured is not None, outcome
    assert outcome.world.size == 2
    assert measured.samples_per_s == pytest.approx(8 / measured.step_s)  # of both together


@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_to_one_rank_ends_all_and_is_told_with_its_number(tmp_path: Path, name: str) -> None:
    fault, kind, cause = FAULTS[name]
    timeout_s = 5 if name == "hangs" else 20
    with runner(tmp_path, fault) as running:
        outcome = probe(running, timeout_s)
        again = running.run(ProbeJob(config=techniques.complete({"batch_size": 8}), settings=SETTINGS))
    assert outcome.kind is kind, outcome
    assert cause in outcome.cause
    assert again.kind is Kind.OK  # alone there is no rank 1


def probe(running: LocalRunner, timeout_s: float = 20) -> Outcome:
    settings = SETTINGS.replace(world=running.world, timeout_s=timeout_s)
    return running.probe(techniques.complete({"batch_size": 2}, global_batch=8, world=running.world), settings)


def test_a_rank_that_fails_ends_the_others_within_seconds(tmp_path: Path) -> None:
    with runner(tmp_path, "raise ValueError('no')") as running:
        outcome = probe(running, timeout_s=60)
    assert outcome.wall_s < 30  # a minute is what the others would wait


def test_a_supervisor_that_dies_takes_its_ranks_with_it(tmp_path: Path) -> None:
    with runner(tmp_path, "time.sleep(1000)") as running:
        config = techniques.complete({"batch_size": 2}, global_batch=8, world=running.world)
        running.submit(ProbeJob(config=config, settings=SETTINGS.replace(world=running.world)))
        ranks = until_there_are(2)
        supervisor = psutil.Process(ranks[0]).ppid()
        os.kill(supervisor, signal.SIGKILL)
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in ranks if psutil.pid_exists(pid)], timeout=5)
        assert not alive


def until_there_are(number: int) -> list[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        me = psutil.Process()
        ranks = [grandchild.pid for child in me.children() for grandchild in child.children()]
        if len(ranks) == number:
            return ranks
        time.sleep(0.05)
    raise AssertionError("the ranks did not begin")


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_ranks_are_compared_with_one_process(tmp_path: Path, parallel: str) -> None:
    with runner(tmp_path) as running:
        config = techniques.complete({"batch_size": 2, "parallel": parallel}, global_batch=8, world=running.world)
        check = running.run(CheckJob(config=config, settings=SETTINGS.replace(world=running.world), batch_size=8))
    assert isinstance(check, Check), check
    assert check.passed, check
    assert check.gradient_error < 1e-5
    assert "steps differ by" in check.reason
