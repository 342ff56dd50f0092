"""Training steps of one process of a world that is not there, run on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.prediction.fake_steps import Tracer
from autotune.prediction.passes import MicroSteps, Pass, fit_end
from autotune.prediction.traces import Purpose
from autotune.prediction.worlds import joined
from autotune.records.config import ALONE, World
from autotune.task.loading import load_task
from autotune.techniques import find_techniques

GPT = Path(__file__).parent.parent.parent / "studies" / "gpt" / "model.py"
SIZE = 4
techniques = find_techniques()


@pytest.fixture
def world() -> Iterator[World]:
    with joined(found := World(size=SIZE)):
        yield found


def traced(world: World, **choices: Any) -> MicroSteps:
    return Tracer(load_task(GPT), "cuda 8.0 108", techniques, world=world).micro_steps(
        techniques.complete(choices), 4, 8
    )


def held_bytes(step: Pass, purpose: Purpose) -> int:
    return sum(step.held[key] for key in step.held if step.purposes[key] is purpose)


def most_bytes(step: Pass) -> int:
    living = most = sum(step.held.values())
    for event in step.events:
        living += event.change_bytes
        most = max(most, living)
    return most


def test_a_shard_holds_its_part_and_gathers_a_block_at_a_time(world: World) -> None:
    whole = traced(ALONE).alone[-1]
    shard = traced(world, parallel="fsdp").alone[-1]
    kept = traced(world, parallel="fsdp_grad").alone[-1]
    parameters = held_bytes(whole, Purpose.PARAMETERS)
    assert held_bytes(shard, Purpose.PARAMETERS) == pytest.approx(parameters / SIZE, rel=0.01)
    assert most_bytes(shard) < most_bytes(kept)  # what is freed after the forward pass is not there at the peak
    assert len({event.stream for event in shard.events}) > 1  # each of which has memory of its own


def test_of_shards_in_host_memory_the_device_holds_what_is_gathered_alone(world: World) -> None:
    shard, on_host = (traced(world, parallel="fsdp", shard_offload=where).alone[-1] for where in (False, True))
    parameters = held_bytes(shard, Purpose.PARAMETERS)
    assert held_bytes(on_host, Purpose.PARAMETERS) < 0.01 * parameters  # buffers
    assert most_bytes(on_host) == pytest.approx(most_bytes(shard) - parameters, rel=0.01)
    copies = [event.size_bytes for event in on_host.events if event.allocates and event.stream]
    gathered = [event.size_bytes for event in shard.events if event.allocates and event.stream]
    assert sum(copies) > sum(gathered)  # each shard comes to the device before it is sent round
    tracer = Tracer(load_task(GPT), "cuda 8.0 108", techniques, world=world)
    choices = dict(techniques.update_group(techniques.complete({"parallel": "fsdp", "shard_offload": True})))
    for update in tracer.updates(techniques.complete(choices), 4):
        assert most_bytes(update) < 0.01 * parameters  # gradients and state of the optimizer lie there, too


def test_copies_hold_buckets_beside_their_gradients_and_make_them_anew_before_the_second_step(world: World) -> None:
    alone, copies = traced(ALONE), traced(world)
    gradients = held_bytes(alone.beside[-1], Purpose.GRADIENTS)
    assert held_bytes(copies.beside[-1], Purpose.GRADIENTS) == 2 * gradients
    assert most_bytes(copies.alone[-1]) == pytest.approx(most_bytes(alone.alone[-1]) + gradients, abs=512)
    assert sum(event.size_bytes for event in copies.spread) == gradients
    assert sum(event.size_bytes for event in copies.regrouped) == gradients


@pytest.mark.parametrize("parallel", ["fsdp", "fsdp_grad", "hsdp:2"])
def test_gradients_that_are_accumulated_are_whole_until_the_last_micro_batch_shares_them_out(
    world: World, parallel: str
) -> None:
    whole = held_bytes(traced(ALONE).beside[-1], Purpose.GRADIENTS)
    steps = traced(world, parallel=parallel)
    assert held_bytes(steps.beside[-1], Purpose.GRADIENTS) == pytest.approx(whole, rel=0.01)
    num_shards = techniques.num_shards(techniques.complete({"parallel": parallel}), world)
    in_the_end = fit_end(steps.alone).by_purpose(8)
    assert in_the_end[Purpose.GRADIENTS] == pytest.approx(whole / num_shards, rel=0.01)
