"""Probes at once on this machine: each slot has processes of its own, on its own processors, and dies alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.devices.linux import processors
from autotune.devices.slots import SlotResources, Slots
from autotune.errors import TaskError
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import InspectJob, ProbeJob
from autotune.runners.runner import ProbeFault, SlotLost
from autotune.runners.slots import SlotsRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.room import limit_bytes

MODEL = """
import os
import torch

def build_model():
    print("threads", torch.get_num_threads(), "processors", sorted(os.sched_getaffinity(0)))
    return torch.nn.Linear(8, 8)

def make_batch(size):
    return torch.ones(size, 8)

def training_step(model, batch):
    return model(batch).square().mean()
"""
SETTINGS = ProbeSettings(memory_limit_bytes=limit_bytes(800), max_timed_s=0.2, max_warmup_s=0.2, timeout_s=30)
PARTS = sorted(processors())[0], sorted(processors())[-1]
SLOTS = Slots(
    slots=tuple(
        SlotResources(name=f"cpu:{number}", device="cpu", processors=frozenset({processor}), num_sharing=2)
        for number, processor in enumerate(PARTS)
    ),
    notes=("half of the cores each",),
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotsRunner]:
    """The last test takes its slots out."""
    folder = tmp_path_factory.mktemp("slots")
    (folder / "model.py").write_text(MODEL)
    with SlotsRunner(TaskSource.of(folder / "model.py"), SLOTS, logs=folder / "logs") as runner:
        yield runner


def probe(batch_size: int = 4) -> ProbeJob:
    return ProbeJob(config=find_techniques().complete({"batch_size": batch_size}), settings=SETTINGS)


def collect(runner: SlotsRunner, number: int) -> list[Outcome]:
    found = []
    for _ in range(number):
        finished = runner.collect()
        assert finished is not None
        found.append(finished.result)
    return sorted(found, key=lambda outcome: outcome.slot)


def kill_supervisor(runner: SlotsRunner, slot: str) -> None:
    connection = runner._members[slot]._connection
    assert connection is not None
    connection._process.kill()


def test_two_probes_run_at_once_each_on_the_processors_of_its_slot(runner: SlotsRunner) -> None:
    runner.submit(probe(4))
    runner.submit(probe(8))
    with pytest.raises(RuntimeError, match="all slots are taken"):
        runner.submit(probe())
    assert runner.collect(timeout_s=0.0) is None  # nothing has ended yet
    first, second = collect(runner, 2)
    assert (first.kind, first.slot, second.kind, second.slot) == (Kind.OK, "cpu:0", Kind.OK, "cpu:1")
    assert first.beside == (f"{probe(8).label} on cpu:1",) and second.beside == (f"{probe(4).label} on cpu:0",)
    for outcome, processor in zip((first, second), PARTS, strict=True):
        assert f"threads 1 processors [{processor}]" in Path(outcome.log).read_text()
    assert runner.notes[0] == "half of the cores each"


def test_slots_on_a_cpu_share_its_memory_and_have_threads_for_their_cores(runner: SlotsRunner) -> None:
    first, second = (slot.device for slot in runner.slots())
    assert 2 * first.free_bytes < first.total_bytes and (first.num_threads, second.num_threads) == (1, 1)
    inspection = runner.run(InspectJob(memory_limit_bytes=SETTINGS.memory_limit_bytes, timeout_s=60.0))
    assert inspection.device.num_threads == 1


def test_a_probe_is_followed_and_ended_by_its_ticket(runner: SlotsRunner) -> None:
    runner.submit(probe(4))
    ticket = runner.submit(probe(8))
    assert runner.progress(ticket) is not None and runner.progress(ticket + 1) is None
    runner.cancel(ticket)
    first, second = collect(runner, 2)
    assert (first.kind, second.kind) in ((Kind.OK, Kind.TIMEOUT), (Kind.OK, Kind.OK))  # it may have ended before


@pytest.mark.slow
def test_a_model_file_that_cannot_be_imported_is_told_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise ValueError('no data here')")
    with (
        pytest.raises(TaskError, match="no data here"),
        SlotsRunner(TaskSource.of(tmp_path / "model.py"), SLOTS, logs=tmp_path / "logs"),
    ):
        pass
    assert not (tmp_path / "logs").exists()


def test_probes_that_start_at_once_on_fewer_cores_than_slots_may_take_longer_to_begin(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    source = TaskSource.of(tmp_path / "model.py")
    crowded = replace(SLOTS, slots=tuple(replace(slot, processors=frozenset({PARTS[0]})) for slot in SLOTS.slots))
    assert SlotsRunner(source, crowded, logs=tmp_path / "logs").slowest_start == 2.0


def test_a_job_that_asks_for_no_slot_runs_in_another_one_when_its_slot_dies(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with SlotsRunner(TaskSource.of(tmp_path / "model.py"), SLOTS, logs=tmp_path / "logs") as runner:
        kill_supervisor(runner, "cpu:0")
        outcome = runner.run(probe())
        assert (outcome.kind, outcome.slot) == (Kind.OK, "cpu:1")
        assert runner.notes[-1].startswith("the slot cpu:0 is taken out: ")
        with pytest.raises(SlotLost, match=r"the slot cpu:0 is taken out: .*; the search goes on with cpu:1") as raised:
            runner.submit(probe(), "cpu:0")
        assert (raised.value.slot, raised.value.tickets) == ("cpu:0", ())


def test_a_slot_that_dies_is_taken_out_and_the_last_one_never_is(runner: SlotsRunner) -> None:
    lost = runner.submit(probe(4), "cpu:0")
    runner.submit(probe(8), "cpu:1")
    kill_supervisor(runner, "cpu:0")
    with pytest.raises(SlotLost, match=r"the slot cpu:0 is taken out: .*; the search goes on with cpu:1") as raised:
        collect(runner, 2)
    assert (raised.value.slot, raised.value.tickets) == ("cpu:0", (lost,))
    assert [slot.name for slot in runner.slots()] == ["cpu:1"]
    assert [outcome.kind for outcome in collect(runner, 1)] == [Kind.OK]

    runner.submit(probe())
    kill_supervisor(runner, "cpu:1")
    with pytest.raises(ProbeFault) as failed:
        runner.collect()
    assert not isinstance(failed.value, SlotLost)
    assert [slot.name for slot in runner.slots()] == ["cpu:1"]
