"""A world over the nodes of a Ray cluster: one rank on each of two played nodes, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("ray") is None:
    pytest.skip("needs Ray: pip install 'autotune-torch[ray]'", allow_module_level=True)

from autotune.records.config import ProbeSettings, World
from autotune.records.outcome import Kind
from autotune.runners.jobs import ProbeJob
from autotune.runners.ray import RayRunner
from autotune.runners.runner import SlotLost
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.played_cluster import HANGS, ROOT, Played, is_supervisor, played_cluster, probe, wait_for
from tests.processes import find_children, is_alive
from tests.room import limit_bytes
from tests.short_play_off import AUTOTUNE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SECOND_FAILS = 555  # a batch size
MODEL = f"""
import os, time
import torch
from torch import distributed

def build_model():
    return torch.nn.Linear(8, 8)

def make_batch(size):
    if size == {SECOND_FAILS} and distributed.get_rank() == 1:
        raise ValueError("the second one's data is broken")
    if size == {HANGS}:
        time.sleep(1000)
    return torch.ones(size, 8)

def training_step(model, batch):
    return model(batch).square().mean()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with played_cluster(tmp_path_factory.mktemp("second")) as played:
        yield played


@pytest.fixture(scope="module")
def runner(cluster: Played, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRunner]:
    folder = tmp_path_factory.mktemp("world")
    (folder / "model.py").write_text(MODEL)
    source = TaskSource.of(folder / "model.py")
    with RayRunner(source, address=cluster.address, devices="cpu:2x1", logs=folder / "logs") as runner:
        yield runner


def probe_of_two(batch_size: int = 4) -> ProbeJob:
    """A short probe of two ranks."""
    settings = ProbeSettings(
        memory_limit_bytes=limit_bytes(800), max_timed_s=0.2, max_warmup_s=0.2, timeout_s=60.0, world=World(size=2)
    )
    return ProbeJob(config=find_techniques().complete({"batch_size": batch_size}), settings=settings)


def test_a_rank_on_each_node_trains_one_model(runner: RayRunner) -> None:
    [slot] = runner.slots()
    host = slot.name.partition("+")[0]
    assert slot.name == f"{host}+{host}.2/cpu" and runner.world == World(size=2)
    outcome = runner.run(probe_of_two())
    assert outcome.ok, outcome.cause
    assert (outcome.slot, outcome.world) == (slot.name, World(size=2))
    assert outcome.measurement is not None and len(outcome.measurement.waits_s) == 2
    assert runner.run(probe()).ok  # the first node's alone


def test_the_rank_that_fails_is_told_and_the_other_ended(runner: RayRunner) -> None:
    outcome = runner.run(probe_of_two(SECOND_FAILS))
    assert outcome.kind is Kind.ERROR
    assert outcome.cause.startswith("rank 1: ") and "the second one's data is broken" in outcome.cause
    assert runner.run(probe_of_two()).ok


def test_a_job_is_ended_on_all_nodes(runner: RayRunner, cluster: Played) -> None:
    ticket = runner.submit(probe_of_two(HANGS))
    wait_for(lambda: len(ranks(cluster)) == 2)
    runner.cancel(ticket)
    finished = runner.collect()
    assert finished is not None and finished.result.kind is Kind.TIMEOUT
    assert not ranks(cluster)


def test_a_node_that_is_lost_takes_the_slot_along_and_nothing_is_left_on_the_other(
    runner: RayRunner, cluster: Played
) -> None:
    ticket = runner.submit(probe_of_two(HANGS))
    started = wait_for(lambda: ranks(cluster) if len(ranks(cluster)) == 2 else None)
    cluster.supervisor().parent().kill()
    with pytest.raises(SlotLost) as lost:
        runner.collect()
    assert lost.value.tickets == (ticket,)
    wait_for(lambda: not any(map(is_alive, started)))
    assert runner.run(probe_of_two()).ok  # both nodes live, and have another slot


def ranks(cluster: Played) -> list[object]:
    """Processes that train now."""
    return [child for one in cluster.ours() if is_supervisor(one) for child in find_children(one)]


def test_a_whole_search(cluster: Played, runner: RayRunner, tmp_path: Path) -> None:
    runner.__exit__(None, None, None)  # the nodes are free then
    (tmp_path / "model.py").write_text(MODEL)
    options = [
        "--runner",
        f"ray:{cluster.address}",
        "--devices",
        "cpu:2x1",
        "--budget",
        "60s",
        "--trials",
        "4",
        "--json",
    ]
    done = subprocess.run(
        [*AUTOTUNE, "search", "model.py", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"]["ok"] >= 2
    assert "1 slot on 2 nodes" in done.stderr
    assert not cluster.ours()
