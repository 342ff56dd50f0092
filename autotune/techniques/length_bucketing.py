"""Batches of samples of similar length, so that little of them is padding."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.task.samples import NUM_SAMPLED, dataset_size, is_stream, width
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch, UnsupportedError
from autotune.techniques.frameworks import At, Lines, Table, words

_WINDOW = 50  # samples of so many batches are grouped by length, as in transformers' LengthGroupedSampler


class LengthBucketing(Switch):
    """Samples in random order, except that within a window of fifty batches samples of similar length share a batch.

    The batches of a window come in random order. So any stretch of training, such as the one that a probe times, has as many
    short and long batches as the whole.

    In the first epoch the training process itself reads each sample once more, for its length, whatever `num_workers` is.
    The first batch waits until the first window is read. After that the reading is spread evenly over the batches, so that
    a probe's timing contains its share of it. If the dataset opens a file at its first read (HDF5, say), the file is then open
    before workers are forked, and they inherit its handle: such a dataset should open the file anew in each process.
    """

    name = "length_bucketing"
    summary = "samples of similar length share a batch: less padding, another order of samples"
    applies = "if included: a dataset with samples of unequal length, which batches pad"
    phase = Phase.LOADER
    order = 50
    # The time of padding is saved, a few percent or most of it; the largest batch stays as large.
    expected = Expectation(compute=Factor(typical=0.6, spread=1.8), data=Factor(spread=1.2))
    changes_learning = True
    keeps_random_masks = True
    likely = (True,)
    frameworks = words(
        transformers=Table(
            {True: {"train_sampling_strategy": "group_by_length"}},
            aliases={
                ("train_sampling_strategy", "random"): False,
                ("group_by_length", True): True,  # before transformers 5
                ("group_by_length", False): False,
            },
        ),
        torch=Lines({At.LOADER: "sampler=Buckets(dataset, BATCH_SIZE)"}),
    )

    def is_redundant(self, config: Config) -> bool:
        """A batch of one sample has no padding."""
        return config.batch_size == 1

    def why_not(self, setting: Setting) -> str:
        """It applies where samples of unequal length are padded to the longest of their batch."""
        from autotune.task.unequal_samples import sample_lengths

        task = setting.task
        dataset: Any = task.dataset()
        if reason := _why_not_of(dataset):
            return reason
        if len(task.widest()) < min(len(dataset), NUM_SAMPLED):
            return "samples take long to read, and each would be read once more for its length"
        lengths = sample_lengths(task, only_whether=True)
        if lengths is None:
            return "a batch is not padded to its longest sample"
        return "samples take the same room in a batch" if lengths.quantiles[0] == lengths.quantiles[-1] else ""

    def apply(self, build: Build, choice: Choice) -> None:
        """Replace the loader's order of samples."""
        dataset = build.task.dataset()
        if reason := _why_not_of(dataset):
            raise UnsupportedError(f"length_bucketing: {reason}")
        build.loader_options["sampler"] = Buckets(dataset, build.config.batch_size)


def _why_not_of(dataset: Any) -> str:
    """Why the order of a dataset's samples is not the loader's to choose; empty where it is."""
    if dataset is None:
        return "the task has no train_dataset, so the order of samples is not the loader's"
    return (
        "the dataset is a stream, whose order is its own" if dataset_size(dataset) is None or is_stream(dataset) else ""
    )


class Buckets:
    """A sampler: every position of a dataset once, so that each run of `batch_size` positions makes a batch of similar lengths.

    The samples of the last, smaller batch are drawn at random. Each length is read once.
    """

    def __init__(self, dataset: Any, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._widths = array("q", [-1]) * len(dataset)

    def __len__(self) -> int:
        return len(self._widths)

    def __iter__(self) -> Iterator[int]:
        size = self._batch_size
        positions = torch.randperm(len(self)).tolist()
        full = len(self) - len(self) % size
        windows = [positions[start : min(start + _WINDOW * size, full)] for start in range(0, full, _WINDOW * size)]
        for window, following in zip(windows, [*windows[1:], []], strict=True):
            ahead = iter(following)
            by_width = sorted(window, key=self._width)
            for number in torch.randperm(len(window) // size).tolist():
                for position in islice(ahead, size):
                    self._width(position)
                yield from by_width[number * size : (number + 1) * size]
        yield from positions[full:]

    def _width(self, position: int) -> int:
        if self._widths[position] < 0:
            self._widths[position] = width(self._dataset[position])
        return self._widths[position]
