from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from autotune import prepare
from autotune.probe.passes import MicroBatches
from autotune.task import Task
from autotune.techniques import UnsupportedError, find_techniques
from autotune.techniques.length_bucketing import LengthBucketing

techniques = find_techniques()

NUM_SAMPLES, BATCH_SIZE = 1003, 8
LENGTHS = [random.Random(i).choice((3, 5, 8, 13, 40)) + i % 3 for i in range(NUM_SAMPLES)]


class Lines(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((LENGTHS[index],), index), index % 4


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        lines = Lines()
        return (lines[index] for index in range(len(lines)))


def padded(samples: Any) -> Any:
    lines, labels = zip(*samples, strict=True)
    return pad_sequence(list(lines), batch_first=True), torch.tensor(labels)


def cut(samples: Any) -> Any:
    lines, labels = zip(*samples, strict=True)
    return torch.stack([line[:2] for line in lines]), torch.tensor(labels)


def unpadded(samples: Any) -> Any:
    lines, labels = zip(*samples, strict=True)
    return list(lines), torch.tensor(labels)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(NUM_SAMPLES, 4), nn.Linear(4, 4)

    def forward(self, ids: Any) -> Any:
        return self.head(self.tokens(ids).mean(1))


TASK = Task(build_model=Mean, train_dataset=Lines, collate_fn=padded)


def epoch(session: Any) -> list[Any]:
    return [micro for step in session.loader for micro in step]


def bucketed(**config: Any) -> Any:
    torch.manual_seed(0)
    return prepare(TASK, {"batch_size": BATCH_SIZE, "length_bucketing": True, **config}, device="cpu")


def samples_of(batches: list[Any]) -> list[int]:
    return [int(number) for ids, _ in batches for number in ids.max(1).values]


@pytest.mark.parametrize("config", [{}, {"accumulation_steps": 2}, {"num_workers": 1}])
def test_each_sample_is_used_once_an_epoch_in_batches_of_the_same_size(config: dict[str, Any]) -> None:
    session = bucketed(**config)
    first, second = epoch(session), epoch(session)
    assert sorted(samples_of(first)) == sorted(samples_of(second)) == list(range(NUM_SAMPLES))
    assert samples_of(first) != samples_of(second)
    assert [len(labels) for _, labels in first] == [BATCH_SIZE] * 125 + [3]
    assert len(session.loader) == -(-126 // config.get("accumulation_steps", 1))


def test_little_is_padding() -> None:
    plain = prepare(TASK, {"batch_size": BATCH_SIZE}, device="cpu")
    elements = [sum(ids.numel() for ids, _ in epoch(session)) for session in (plain, bucketed())]
    assert elements[0] > 1.5 * sum(LENGTHS) and elements[1] < 1.1 * sum(LENGTHS)


def test_what_a_probe_times_is_like_the_whole() -> None:
    """Any stretch of batches has its share of long ones, and of the reading of lengths."""
    reads = 0

    class Counted(Lines):
        def __getitem__(self, index: int) -> Any:
            nonlocal reads
            reads += 1
            return super().__getitem__(index)

    task = dataclasses.replace(TASK, train_dataset=Counted)
    means = []
    for seed in range(20):
        torch.manual_seed(seed)
        session = prepare(task, {"batch_size": BATCH_SIZE, "length_bucketing": True}, device="cpu")
        batches = MicroBatches(session)
        widths = [next(batches)[0][0].shape[1]]
        before = reads
        for _ in range(11):
            widths.append(next(batches)[0][0].shape[1])
            assert reads - before == 2 * BATCH_SIZE  # one for the batch, one for a length of the next window
            before = reads
        means.append(sum(widths) / len(widths))
    assert sum(means) / len(means) == pytest.approx(sum(LENGTHS) / NUM_SAMPLES, rel=0.12)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train_dataset": None, "make_batch": lambda n: torch.zeros(n, 4)}, "the task has no train_dataset"),
        ({"train_dataset": Stream}, "the dataset is a stream"),
    ],
)
def test_a_config_that_asks_for_it_where_it_cannot_be_says_why(changes: Any, reason: str) -> None:
    task = dataclasses.replace(TASK, **changes)
    with pytest.raises(UnsupportedError, match=f"length_bucketing: {reason}"):
        prepare(task, {"batch_size": BATCH_SIZE, "length_bucketing": True}, device="cpu")


def test_it_is_asked_for_and_labelled(make_setting: Any) -> None:
    assert LengthBucketing().support(make_setting(TASK)).choices == (False, True)
    assert LengthBucketing().changes_learning
    alone = techniques.complete({"batch_size": 1, "length_bucketing": True})
    assert LengthBucketing().is_redundant(alone)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train_dataset": None, "make_batch": lambda n: padded([Lines()[0]] * n)}, "no train_dataset"),
        ({"train_dataset": Stream}, "stream"),
        ({"collate_fn": cut}, "the same room"),
        ({"collate_fn": unpadded}, "not padded"),
    ],
)
def test_it_says_where_it_does_not_apply(changes: dict[str, Any], reason: str, make_setting: Any) -> None:
    support = LengthBucketing().support(make_setting(dataclasses.replace(TASK, **changes)))
    assert support.choices == (False,) and reason in support.reason


def test_samples_that_take_long_to_read_are_not_read_twice(make_setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.task.samples.MAX_SAMPLING_S", 0.0)
    support = LengthBucketing().support(make_setting(dataclasses.replace(TASK)))
    assert support.choices == (False,) and "long to read" in support.reason
