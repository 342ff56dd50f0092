"""What a process of the user's command is told and asked, without a command around it."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.probe import waiting
from autotune.probe.waiting import RankTimes
from autotune.records.config import ProbeSettings, World
from autotune.runners import hook, launch, watch
from autotune.units import GIB
from tests.devices.fake_card import CONTEXT_BYTES, Card, Machine
from tests.worlds import Ranks


def watched(
    tmp_path: Path, accumulation_steps: int = 1, *, told: dict[str, Any] | None = None, **changes: Any
) -> watch.Watch:
    """The watch of a process of a command.

    Args:
        told: to it, in place of or beside what is usual.
    """
    reports = tmp_path / "reports"
    reports.mkdir(exist_ok=True)
    settings = ProbeSettings(memory_limit_bytes=None, max_warmup_s=0.0, **changes)
    config = {"batch_size": 8, "accumulation_steps": accumulation_steps}
    return watch.Watch(
        {
            "settings": settings.to_dict(),
            "config": config,
            "device": "cpu",
            "reports": str(reports),
            "started_s": 0.0,
            **(told or {}),
        }
    )


def test_what_a_process_on_a_gpu_holds_beside_its_model_is_memory_of_the_card_and_not_of_the_host(
    tmp_path, monkeypatch
):
    process = Machine(monkeypatch, Card()).process_of(0)
    process.create_context()
    process.allocate(2 * GIB)  # the model
    one = watched(tmp_path, told={"device": "cuda:0", "outside_bytes": 6 * GIB})
    assert one._report.outside_bytes == 0  # nothing is known of the card yet
    weight = SimpleNamespace(device=torch.device("cuda:0"))
    one._begin(SimpleNamespace(param_groups=[{"params": [weight]}]))
    assert one._report.outside_bytes == CONTEXT_BYTES


def test_ranks_that_only_the_environment_names_are_not_believed(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "")
    assert watch._place() == World()


def test_a_rank_that_does_not_decide_is_held_up_no_more_often_than_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_place", lambda: World(size=2, rank=1))
    monkeypatch.setattr(watch, "MIN_BLOCK_S", 3600.0)
    rank = watched(tmp_path)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    rank.stepped(optimizer)
    synchronized = []
    monkeypatch.setattr(rank._device, "synchronize", lambda: synchronized.append(1))
    for _ in range(100):
        rank.stepped(optimizer)
    assert len(synchronized) < 10


def steps_of_unequal_ranks(world: World, tmp_path: Path, late_s: float, *, waits_once: bool) -> tuple[RankTimes, ...]:
    """What a watched rank's clocks tell of some steps of four micro steps, where rank 1 computes for longer than rank 0."""
    rank = watched(tmp_path, accumulation_steps=4, num_steps=10**6)
    copies = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(copies.parameters())
    for _ in range(watch.NUM_TOLD + 2):
        for number in range(4):
            with copies.no_sync() if waits_once and number < 3 else nullcontext():
                loss = copies(torch.randn(4, 8)).sum()
                time.sleep(0.005 + late_s * world.rank)
                loss.backward()
        optimizer.step()
        rank.stepped(optimizer)
    return rank._report.times


@pytest.mark.parametrize("waits_once", [True, False])
def test_a_slow_rank_is_seen_where_gradients_are_accumulated(tmp_path: Path, waits_once: bool) -> None:
    with Ranks() as processes:
        times = processes.run(partial(steps_of_unequal_ranks, waits_once=waits_once), tmp_path, 0.01)
    found = waiting.Ranks.of(times)
    assert found is not None and found.slow_rank == 1
    of_wait = 4 if waits_once else 1
    assert all(one.forward_s + one.backward_s > 0.015 * of_wait for one in times[1])


@pytest.mark.parametrize("launcher", ["alive", "dead"])
def test_a_process_whose_launcher_is_gone_leaves(tmp_path, launcher):
    one = watched(tmp_path)
    one._looked_s = float("-inf")
    with (tmp_path / "probe.json").open("w") as held:
        if launcher == "alive":
            fcntl.flock(held, fcntl.LOCK_EX)
        child = os.fork()
        if not child:
            one._look_for_launcher()
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (launcher == "dead")


def test_a_command_of_one_process_sees_one_gpu_and_one_of_several_all(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    seen = {
        (device, ranks): launch._environment(tmp_path, (device,), ranks and World(size=ranks))["CUDA_VISIBLE_DEVICES"]
        for device, ranks in [("cuda:0", None), ("cuda:0", 1), ("cuda:0", 2), ("cuda:1", 1), ("cpu", 1)]
    }
    assert list(seen.values()) == ["5,6", "5", "5,6", "6", ""]


@pytest.mark.parametrize(("local_rank", "limited"), [("", 0), ("1", 1), ("7", 0)])
def test_the_limit_is_set_on_the_card_alone_that_the_process_will_use(monkeypatch, local_rank, limited):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    current, fractions = [0], {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_exchange_device", lambda index: [current.pop(), current.append(index)][0])
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda index: [current.pop(), current.append(index)][0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=100))

    def limit(fraction: float, index: int) -> None:
        fractions[index] = fraction

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    hook._limit_gpu(50)
    assert fractions == {limited: 0.5} and current == [0]
