"""Training steps of a shard run on fake tensors: one process of a world that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from autotune.prediction import fake_steps
from autotune.prediction.passes import MicroSteps, Pass
from autotune.prediction.traces import Purpose
from autotune.records.config import World
from autotune.session import Session, prepare
from autotune.task.loading import load_task
from autotune.techniques import find_techniques

GPT = Path(__file__).parent.parent.parent / "studies" / "gpt" / "model.py"
SIZE = 4
techniques = find_techniques()


@pytest.fixture
def fake_group() -> Iterator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    yield
    distributed.destroy_process_group()


def traced(monkeypatch: pytest.MonkeyPatch, **choices: Any) -> MicroSteps:
    def in_world(*given: Any, **options: Any) -> Session:
        return prepare(*given, **{**options, "world": World(size=SIZE if choices else 1)})

    monkeypatch.setattr(fake_steps, "prepare", in_world)
    return fake_steps.Tracer(load_task(GPT), "cpu", techniques).micro_steps(techniques.complete(choices), 4, 8)


def parameters_bytes(step: Pass) -> int:
    return sum(step.held[key] for key in step.held if step.purposes[key] is Purpose.PARAMETERS)


def most_bytes(step: Pass) -> int:
    living = most = sum(step.held.values())
    for event in step.events:
        living += event.change_bytes
        most = max(most, living)
    return most


def test_a_shard_holds_its_part_and_gathers_a_block_at_a_time(
    monkeypatch: pytest.MonkeyPatch, fake_group: None
) -> None:
    whole = traced(monkeypatch).alone[-1]
    shard = traced(monkeypatch, parallel="fsdp").alone[-1]
    kept = traced(monkeypatch, parallel="fsdp_grad").alone[-1]
    assert parameters_bytes(shard) == pytest.approx(parameters_bytes(whole) / SIZE, rel=0.01)
    assert most_bytes(shard) < most_bytes(kept)  # what is freed after the forward pass is not there at the peak
