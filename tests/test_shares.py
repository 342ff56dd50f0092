"""Each process of a world reads samples of its own, and as many as the others."""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import TaskError
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


def reading(dataset: type) -> Task:
    return Task(build_model=build_model, training_step=training_step, train_dataset=dataset, global_batch=8)


def read(world: World, dataset: type, bucketing: bool) -> list[list[int]]:
    """The samples of two epochs."""
    session = prepare(reading(dataset), {"batch_size": 2, "length_bucketing": bucketing}, device="cpu", world=world)
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


class EndsEarly(Stream):
    """A stream of 37 samples, of which the second process sees the first 21."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return itertools.islice(super().__iter__(), 21 if torch.distributed.get_rank() else None)


class Fewer(Lines):
    def __len__(self) -> int:
        return 37 - torch.distributed.get_rank()


def trains_on(world: World, dataset: type) -> tuple[list[int], str]:
    """The samples of the steps of a pass; what is said of it, or what is raised."""
    said = io.StringIO()
    logging.getLogger("autotune").addHandler(handler := logging.StreamHandler(said))
    try:
        session = prepare(reading(dataset), {"batch_size": 2, "parallel": "fsdp"}, device="cpu", world=world)
        sizes = [sum(batch.sizes) for batch in session.loader if session.step(batch) is not None]
        return sizes, said.getvalue()
    except TaskError as error:
        return [], str(error)
    finally:
        logging.getLogger("autotune").removeHandler(handler)


def test_a_stream_that_ends_early_in_one_process_ends_the_pass_for_all_and_is_told(ranks: Ranks) -> None:
    for sizes, said in ranks.run(trains_on, EndsEarly):
        assert sizes == [4, 4]  # of ten samples of its own the second process makes two steps and a half
        assert "the pass ends for all after 2 steps" in said
    assert ranks.run(trains_on, Stream)[1] == ([4, 4, 4, 4, 2], "")


def test_datasets_of_different_lengths_are_refused(ranks: Ranks) -> None:
    for _, said in ranks.run(trains_on, Fewer):
        assert said.startswith("train_dataset has 37, 36 samples in the processes")
