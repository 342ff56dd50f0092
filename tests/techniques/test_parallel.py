"""What several processes may do with a model. What they then train: `tests/test_session_worlds.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autotune.devices import open_device
from autotune.errors import ConfigError
from autotune.records.config import World
from autotune.techniques import Setting, find_techniques

from .kinds import KINDS

techniques = find_techniques()
OPTIONS = ("ddp_bucket_view", "ddp_static_graph", "bucket_mb", "shard_dtype", "shard_offload", "sync_batchnorm")


def setting(kind: str = "transformer", size: int = 4, **changes: Any) -> Setting:
    task = replace(KINDS[kind](), **changes)
    model = task.model()
    return Setting(
        task=task,
        device=open_device("cpu"),
        model=model,
        optimizer=task.optimizer(model),
        batch=task.batch(2),
        baseline=techniques.complete({}).as_dict(),
        dataset_size=None,
        world=World(size=size),
    )


@pytest.mark.parametrize("name", ["parallel", *OPTIONS])
def test_one_process_has_nothing_to_choose(name: str) -> None:
    assert techniques[name].support(setting(size=1)).choices == (techniques[name].off,)


def test_four_processes_may_hold_copies_or_shards_or_copies_of_shards() -> None:
    found = techniques["parallel"].support(setting())
    assert found.choices == ("ddp", "zero1", "fsdp", "fsdp_grad", "hsdp:2")


def test_an_optimizer_that_is_not_torchs_own_is_not_sharded() -> None:
    class Own(torch.optim.SGD):
        pass

    found = techniques["parallel"].support(setting(configure_optimizers=lambda model: Own(model.parameters(), 0.1)))
    assert "zero1" not in found.choices


@pytest.mark.parametrize("choice", ["hsdp:0", "hsdp", "dp", 2])
def test_a_choice_that_there_is_not_is_refused(choice: Any) -> None:
    with pytest.raises(ConfigError, match="expected one of ddp"):
        techniques.complete({"parallel": choice})


@pytest.mark.parametrize(
    ("parallel", "name"), [("fsdp", "bucket_mb"), ("ddp", "shard_dtype"), ("hsdp:2", "ddp_bucket_view")]
)
def test_an_option_of_what_is_not_there_is_redundant(parallel: str, name: str) -> None:
    choice = next(choice for choice in techniques[name].choices if choice != techniques[name].off)
    config = techniques.complete({"parallel": parallel, name: choice})
    assert "parallel=" in techniques[name].conflict(config)


def test_batch_normalisation_over_all_is_another_training_and_needs_a_gpu() -> None:
    sync = techniques["sync_batchnorm"]
    assert sync.changes_learning
    assert sync.support(setting("transformer")).reason == "the model has no BatchNorm"

    def build_model() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    found = sync.support(setting("transformer", build_model=build_model, configure_optimizers=None))
    assert found.reason == "torch has it for GPUs alone"
    alone = sync.support(setting("transformer", size=1, build_model=build_model, configure_optimizers=None))
    assert alone.reason == "only one process trains; --devices starts several"
