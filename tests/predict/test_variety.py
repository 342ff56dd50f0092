"""How many shapes batches have, from the widths of a few samples."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from autotune.predict import variety
from autotune.predict.variety import Variety, variety_of
from autotune.task import Task


def lines(collate=pad_sequence, *, widths=range(1, 101), dataset=None):
    samples = dataset or [torch.zeros(width, 8) for width in widths]
    return Task(
        build_model=lambda: torch.nn.Linear(8, 1),
        train_dataset=lambda: samples,
        collate_fn=collate,
        training_step=lambda model, batch: model(batch).mean(),
        configure_optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def to_a_multiple_of_16(samples):
    longest = -(-max(len(sample) for sample in samples) // 16) * 16
    return torch.stack([torch.nn.functional.pad(s, (0, 0, 0, longest - len(s))) for s in samples])


def to_100(samples):
    return torch.stack([torch.nn.functional.pad(s, (0, 0, 0, 100 - len(s))) for s in samples])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(3, 8)])


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_the_number_of_shapes_is_what_drawing_at_random_gives(batch_size):
    widths = [int(random.Random(n).expovariate(1 / 30)) for n in range(1000)]
    found = sorted(set(widths))
    variety = Variety(widths=tuple(found), counts=tuple(map(widths.count, found)), num_samples=1000)
    drawn = random.Random(0)
    epochs = [len({max(drawn.choices(widths, k=batch_size)) for _ in range(1000 // batch_size)}) for _ in range(100)]
    assert variety.num_shapes(batch_size) == pytest.approx(sum(epochs) / 100, rel=0.05)


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_the_mean_width_is_that_of_the_widest_sample_of_a_batch_drawn_at_random(batch_size):
    widths = [int(1 + random.Random(n).expovariate(1 / 30)) for n in range(1000)]
    found = sorted(set(widths))
    variety = Variety(widths=tuple(found), counts=tuple(map(widths.count, found)), num_samples=1000)
    drawn = random.Random(0)
    batches = [max(drawn.choices(widths, k=batch_size)) for _ in range(4000)]
    assert variety.mean_width(batch_size) == pytest.approx(sum(batches) / 4000, rel=0.05)


def test_samples_of_one_width_make_batches_of_one_shape():
    assert Variety(widths=(8,), counts=(300,), num_samples=300).num_shapes(7) == 1


def test_widths_are_those_after_the_collate_function():
    assert len(variety_of(lines()).counts) == 100
    assert variety_of(lines(to_a_multiple_of_16)).counts == (16,) * 6 + (4,)
    assert variety_of(lines(to_100)).counts == (100,)


def test_nothing_is_said_of_a_stream_nor_where_batches_are_not_padded_to_the_widest():
    assert variety_of(lines(dataset=Stream())) is None
    assert variety_of(lines(torch.cat)) is None
    assert variety_of(lines(lambda samples: torch.zeros(0))) is None


def test_nothing_is_said_from_too_few_samples_of_many(monkeypatch):
    monkeypatch.setattr(variety, "MAX_SAMPLING_S", 0.0)
    assert variety_of(lines()) is None
    assert variety_of(lines(widths=[4])).counts == (1,)


def test_samples_may_be_dicts():
    samples = [{"words": torch.zeros(width), "label": torch.tensor(1)} for width in (2, 3)]

    def collate(samples):
        words = pad_sequence([sample["words"] for sample in samples])
        return {"words": words, "label": torch.stack([sample["label"] for sample in samples])}

    assert variety_of(lines(collate, dataset=samples)).widths == (2 + 1, 3 + 1)


def test_what_the_users_code_raises_is_raised():
    with pytest.raises(IndexError):
        variety_of(lines(lambda samples: samples[1]))


def test_plain_data_and_back():
    variety = variety_of(lines(widths=(3, 3, 5)))
    assert Variety.from_dict(json.loads(json.dumps(asdict(variety)))) == variety
    assert variety == Variety(widths=(3 * 8, 5 * 8), counts=(2, 1), num_samples=3)
