"""What fails in one process of a world raises in all, with the reason, also without a launcher that ends the others."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch._dynamo  # an optimizer's first step imports it: once for all ranks
from torch import distributed, nn

from autotune import alarm
from autotune.errors import PeerError
from autotune.records.config import World
from autotune.session import prepare
from autotune.task import Task
from tests.worlds import Ranks


def failing(world: World, parallel: str, fault: str) -> tuple[str, str, list[str], float]:
    """Takes a step, then one that fails in rank 1 alone: the error's kind and words, its notes, and when it was raised."""

    def training_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        if len(steps) == 1 and world.rank == 1:
            if fault == "out of memory":
                held = psutil.Process().memory_info().vms
                resource.setrlimit(resource.RLIMIT_DATA, (held + 2**28, held + 2**28))
                torch.ones(2**30)
            if fault == "no store":
                Path(distributed.distributed_c10d._get_default_store().underlying_store.path).unlink()
            raise ValueError(fault)
        return out.square().mean()

    steps: list[torch.Tensor] = []
    task = Task(
        build_model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)]),
        make_batch=lambda n: torch.randn(n, 8),
        training_step=training_step,
        global_batch=8,
    )
    session = prepare(task, {"batch_size": 4, "parallel": parallel}, device="cpu", world=world)
    try:
        while True:
            steps.append(session.step(torch.randn(4, 8)))
    except Exception as error:
        raised_s = time.monotonic()
        with pytest.raises(
            PeerError, match=r"rank 1 |without a word"
        ):  # at once: nobody is there to take another step with
            session.step(torch.randn(4, 8))
        return type(error).__name__, str(error), getattr(error, "__notes__", []), raised_s


@pytest.mark.parametrize(
    ("parallel", "fault", "said"),
    [
        ("ddp", "out of memory", "rank 1 ran out of memory (an allocation of 4.00 GiB failed), and no other process"),
        ("fsdp", "no such word", "rank 1 failed with ValueError: no such word, and no other process can go on"),
        ("ddp", "no store", "another process has ended without a word, and this one cannot go on without it"),
    ],
)
def test_what_fails_in_one_process_raises_in_all_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, parallel: str, fault: str, said: str
) -> None:
    if fault == "no store":
        monkeypatch.setattr(alarm, "TELL_S", 0.3)  # nobody hears, however long it takes
    with Ranks() as ranks:
        (peer, words, _, heard_s), (kind, own, notes, raised_s) = ranks.run(failing, parallel, fault, last=True)
    print(f"| {fault} | {words} | {heard_s - raised_s:.1f} s |")
    assert peer == PeerError.__name__
    assert said in words
    if fault == "out of memory":
        assert kind == "RuntimeError"
        assert "the other processes are somewhere in the same step" in notes[-1]
        assert "go on from a checkpoint" in words
    else:
        assert (kind, own, notes) == ("ValueError", fault, [])


def losing(world: World) -> tuple[str, str, float]:
    """Takes steps until rank 0 is killed, which keeps the store: the error's kind and words, and when it was raised."""

    def training_step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(steps) == 1 and world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).square().mean()

    steps: list[torch.Tensor] = []
    task = Task(
        build_model=lambda: nn.Linear(8, 8),
        make_batch=lambda n: torch.randn(n, 8),
        training_step=training_step,
        global_batch=8,
    )
    session = prepare(task, {"batch_size": 4}, device="cpu", world=world)
    try:
        while True:
            steps.append(session.step(torch.randn(4, 8)))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic()


def test_where_the_process_that_kept_the_store_was_killed_the_others_raise() -> None:
    with Ranks(kept_by_first=True) as ranks:
        killed, (peer, words, _) = ranks.run(losing, last=True)
    assert killed is None
    assert peer == PeerError.__name__
    assert "cannot go on without it" in words
