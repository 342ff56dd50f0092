"""How wide batches of unequal samples are, from the lengths of a few samples."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from autotune.task import Task
from autotune.task import lengths as module
from autotune.task.lengths import LengthDistribution, sample_lengths


def lines(collate=pad_sequence, *, widths=range(1, 101), dataset=None):
    samples = dataset or [torch.zeros(width, 8) for width in widths]
    return Task(
        build_model=lambda: torch.nn.Linear(8, 1),
        train_dataset=lambda: samples,
        collate_fn=collate,
        training_step=lambda model, batch: model(batch).mean(),
        configure_optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def to_100(samples):
    return torch.stack([torch.nn.functional.pad(s, (0, 0, 0, 100 - len(s))) for s in samples])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(3, 8)])


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_the_mean_width_is_that_of_the_longest_sample_of_a_random_batch(batch_size):
    widths = [int(1 + random.Random(n).expovariate(1 / 30)) for n in range(1000)]
    found = sample_lengths(lines(widths=widths))
    drawn = random.Random(0)
    batches = [max(drawn.choices(widths, k=batch_size)) for _ in range(4000)]
    assert found.mean_width(batch_size) == pytest.approx(8 * sum(batches) / 4000, rel=0.06)


def test_lengths_are_those_after_the_collate_function():
    assert sample_lengths(lines()).quantiles == tuple(range(8, 801, 8))
    assert sample_lengths(lines(to_100)) == LengthDistribution((800,))
    assert sample_lengths(lines(to_100)).mean_width(1) == sample_lengths(lines(to_100)).mean_width(7) == 800


def test_nothing_is_said_of_a_stream_nor_where_batches_are_not_padded_to_the_longest():
    assert sample_lengths(lines(dataset=Stream())) is None
    assert sample_lengths(lines(torch.cat)) is None
    assert sample_lengths(lines(lambda samples: torch.zeros(0))) is None


def test_nothing_is_said_from_too_few_samples_of_many(monkeypatch):
    monkeypatch.setattr(module, "MAX_SAMPLING_S", 0.0)
    assert sample_lengths(lines()) is None
    assert sample_lengths(lines(widths=[4])) == LengthDistribution((32,))


def test_what_the_users_code_raises_is_raised():
    with pytest.raises(IndexError):
        sample_lengths(lines(lambda samples: samples[1]))
