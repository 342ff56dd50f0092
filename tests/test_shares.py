"""Each process of a world reads samples of its own, and as many as the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autotune.records.config import World
from autotune.session import prepare
from autotune.task import Task
from tests.worlds import Ranks


class Lines(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((12,), index), torch.full((12,), index)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (Lines()[index] for index in range(37))


class Shuffled(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (Lines()[index] for index in torch.randperm(36).tolist())


def build_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))


def training_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def read(world: World, dataset: type, bucketing: bool) -> list[list[int]]:
    """The samples of two epochs."""
    task = Task(build_model=build_model, training_step=training_step, train_dataset=dataset, global_batch=8)
    session = prepare(task, {"batch_size": 2, "length_bucketing": bucketing}, device="cpu", world=world)
    return [[int(sample[0]) for step in session.loader for micro in step for sample in micro[0]] for _ in range(2)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


@pytest.mark.parametrize("bucketing", [False, True])
def test_each_process_reads_samples_of_its_own_and_as_many_as_the_others(ranks: Ranks, bucketing: bool) -> None:
    first, second = ranks.run(read, Lines, bucketing)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other) == 19
        assert {*one, *other} == {*range(37)}  # one sample is read twice, for 37 do not divide by two
    assert first[0] != first[1]


def test_a_stream_is_dealt_out_and_ends_in_all_processes_at_once(ranks: Ranks) -> None:
    first, second = ranks.run(read, Stream, False)
    assert first[0] == [*range(0, 36, 2)]
    assert second[0] == [*range(1, 36, 2)]


def test_a_stream_that_shuffles_is_dealt_out_without_repeating_or_losing_a_sample(ranks: Ranks) -> None:
    first, second = ranks.run(read, Shuffled, False)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == [*range(36)]
    assert first[0] != first[1]
