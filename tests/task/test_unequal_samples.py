"""How wide batches of unequal samples are, and the sample at which training fails: which one, how it and the others look, what to do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from autotune.errors import TaskError
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind
from autotune.runners.local import LocalRunner
from autotune.task import Task, samples
from autotune.task import unequal_samples as module
from autotune.task.source import TaskSource
from autotune.task.unequal_samples import LengthDistribution, odd_sample, sample_lengths
from autotune.techniques import find_techniques


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


complete = find_techniques().complete

SIZE, BAD = 48, 17
USUAL = "and 47 others looked at are like sample 0, a tuple of 2 (a float32 tensor of shape (8,), the int 0)"
ADVICE = "correct it, or leave it out of the dataset"
FILE = """
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, position):
        x, y = torch.randn(8), position % 4
        return ({bad}) if position == 17 else (x, y)

def build_model():
    return torch.nn.Linear(8, 4)

def train_dataset():
    return Data()

GLOBAL_BATCH = 48
"""


def good(position: int) -> Any:
    return torch.full((8,), float(position)), position % 4


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, bad: Callable[[], Any]) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, position: int) -> Any:
        return self._bad() if position == BAD else good(position)


class StreamOf(torch.utils.data.IterableDataset[Any]):
    def __init__(self, dataset: Data) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self._dataset[position] for position in range(SIZE))


def task_of(dataset: Any) -> Task:
    return Task(build_model=lambda: torch.nn.Linear(8, 4), train_dataset=lambda: dataset)


def corrupt() -> Any:
    raise ValueError("corrupt record")


@pytest.mark.parametrize("kind", [Data, lambda bad: StreamOf(Data(bad))], ids=["by position", "stream"])
@pytest.mark.parametrize(
    ("bad", "seen"),
    [
        (lambda: None, "is None"),
        (lambda: ("x", 1), "is a tuple of 2 (the string 'x', the int 1)"),
        (lambda: (torch.zeros(8),), "is a tuple of 1 (a float32 tensor of shape (8,))"),
        (lambda: (torch.zeros(8).double(), 1), "is a tuple of 2 (a float64 tensor of shape (8,), the int 1)"),
        (lambda: (torch.zeros(9), 1), "is a tuple of 2 (a float32 tensor of shape (9,), the int 1)"),
        (lambda: (torch.zeros(2, 4), 1), "is a tuple of 2 (a float32 tensor of shape (2, 4), the int 1)"),
    ],
)
def test_a_sample_of_another_look_is_told_with_the_usual_one(kind: Any, bad: Any, seen: str) -> None:
    assert odd_sample(task_of(kind(bad))) == f"sample {BAD} of your train_dataset {seen}, {USUAL}; {ADVICE}"


@pytest.mark.parametrize("kind", [Data, lambda bad: StreamOf(Data(bad))], ids=["by position", "stream"])
def test_a_sample_that_cannot_be_read_is_named_wherever_it_is_read(kind: Any) -> None:
    expected = rf"reading sample {BAD} of your train_dataset raised ValueError: corrupt record .*leave it out"
    dataset = kind(corrupt)
    with pytest.raises(TaskError, match=expected):
        samples.widest_first(dataset)
    with pytest.raises(TaskError, match=expected):
        samples.widest_samples(dataset, [BAD], 1)
    assert odd_sample(task_of(dataset)).startswith(f"reading sample {BAD} of your train_dataset raised ValueError")


def test_a_value_that_is_not_finite_is_told_where_that_was_seen() -> None:
    task = task_of(Data(lambda: (torch.full((8,), torch.nan), 1)))
    told = f"sample {BAD} of your train_dataset holds nan or inf, and 47 others looked at do not; {ADVICE}"
    assert odd_sample(task, nonfinite=True) == told and odd_sample(task) == ""


def test_a_sample_that_fails_by_itself_is_told() -> None:
    told = odd_sample(task_of(Data(lambda: (torch.zeros(8), 7))), lambda sample: sample[1] > 3)
    assert told == (
        f"sample {BAD} of your train_dataset, a tuple of 2 (a float32 tensor of shape (8,), the int 7), fails like this by itself, "
        f"and 47 others looked at do not; {ADVICE}"
    )


def test_samples_that_are_unequal_by_nature_or_all_alike_are_none_of_them_odd() -> None:
    assert odd_sample(task_of([torch.zeros(position + 1) for position in range(SIZE)])) == ""
    assert odd_sample(task_of([good(position) for position in range(SIZE)]), lambda sample: True) == ""
    assert odd_sample(task_of([good(0), None])) == ""  # of two, neither is the usual one
    assert odd_sample(Task(build_model=torch.nn.Identity, make_batch=torch.zeros)) == ""


@pytest.mark.parametrize(
    ("bad", "config", "cause"),
    [
        ("x.double(), y", {}, "sample 17 of your train_dataset is a tuple of 2 (a float64 tensor"),
        (
            "x, 7",
            {},
            "sample 17 of your train_dataset, a tuple of 2 (a float32 tensor of shape (8,), the int 7), fails like this by",
        ),
        (
            "x, None",
            {"num_workers": 1},
            "sample 17 of your train_dataset is a tuple of 2 (a float32 tensor of shape (8,), None)",
        ),
        ("x / 0, y", {}, "sample 17 of your train_dataset holds nan or inf"),
    ],
)
def test_a_probe_that_fails_by_a_sample_tells_which(bad: str, config: Any, cause: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FILE.format(bad=bad))
    with LocalRunner(TaskSource.of(tmp_path / "model.py"), device="cpu", logs=tmp_path / "logs") as runner:
        settings = ProbeSettings(memory_limit_bytes=4 * 2**30, timeout_s=60)
        outcome = runner.probe(complete({"batch_size": 16, **config}, global_batch=48), settings)
    assert outcome.kind in (Kind.ERROR, Kind.NONFINITE) and cause in outcome.cause


def test_whether_lengths_differ_is_known_after_few_samples():
    reads = []

    class Counting(list):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    samples = Counting(torch.ones(1 + number % 5, 8) for number in range(2000))
    task = lines(dataset=samples)
    few = sample_lengths(task, only_whether=True)
    assert few is not None and few.quantiles[0] < few.quantiles[-1]
    assert len(reads) <= module.MIN_SAMPLES + 2  # and the two that are collated together
