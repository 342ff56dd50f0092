"""Finds the widest samples of a training set, and makes batches of them to measure the memory that training needs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autotune.errors import TaskError
from autotune.lazy import torch
from autotune.task.usercode import describe, user_code
from autotune.units import plural

NUM_SAMPLED = 512
MAX_SAMPLING_S = 2.0
_ADVICE = "correct that sample, or leave it out of the dataset, and run again"


class Sampled(NamedTuple):
    """The samples of a dataset that were looked at.

    Attributes:
        positions: their positions, the widest first.
        whole: whether it is certain that the dataset has no others.
    """

    positions: tuple[int, ...]
    whole: bool


def check_dataset(dataset: Any, name: str = "train_dataset") -> Any:
    """Return `dataset`, which the task's function `name` made, if batches can be made of it. Raises TaskError otherwise."""
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise TaskError(
            f"{name} returned a DataLoader; expected its dataset, so that the batch size can be searched: "
            "return `loader.dataset`, and give the loader's collate_fn as collate_fn(samples)"
        )
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return dataset
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TaskError(
            f"{name} returned {describe(dataset)}; expected a torch.utils.data.Dataset (or anything with "
            "__len__ and __getitem__ by position): return the data set itself"
        )
    if len(dataset) == 0:
        raise TaskError(
            f"{name} returned {describe(dataset)} of 0 samples; expected at least one: check where it reads from"
        )
    return dataset


def dataset_size(dataset: Any) -> int | None:
    """Samples in the dataset; None for a stream of unknown length."""
    try:
        return len(dataset)
    except TypeError:
        return None


def widest_first(dataset: Any) -> Sampled:
    """Positions of up to 512 samples, the widest first: random ones, or a stream's first, as far as 2 s suffice to look at them.

    The width of a sample is the number of elements of its tensors and arrays, or the length of its sequences.
    """
    size = None if is_stream(dataset) else len(dataset)
    deadline = time.monotonic() + MAX_SAMPLING_S
    widths: list[tuple[int, int]] = []
    samples: Iterable[tuple[int, Any]]
    in_time = True
    if size is None:
        samples = itertools.islice(read_stream(dataset), NUM_SAMPLED)
    else:
        positions = random.Random(0).sample(range(size), min(size, NUM_SAMPLED))
        samples = ((position, read(dataset, position)) for position in positions)
    for position, sample in samples:
        widths.append((width(sample), position))
        if time.monotonic() > deadline:
            in_time = False
            break
    ordered = tuple(position for _, position in sorted(widths, key=lambda pair: (-pair[0], pair[1])))
    return Sampled(ordered, whole=in_time and len(ordered) < NUM_SAMPLED)


def widest_samples(dataset: Any, widest: Sequence[int], count: int) -> list[Any]:
    """The `count` widest of the samples that were looked at, repeated if these were too few.

    Raises:
        TaskError: the dataset has fewer samples than that.
    """
    stream = is_stream(dataset)
    size = (count if widest else 0) if stream else len(dataset)
    if count > size:
        raise TaskError(
            f"a batch of {plural(count, 'sample')} was asked for, but the training set has {size}; choose a smaller batch_size"
        )
    positions = list(itertools.islice(itertools.cycle(widest), count))
    if not stream:
        return [read(dataset, position) for position in positions]
    wanted = set(positions)
    taken = itertools.islice(read_stream(dataset), max(wanted) + 1)
    found = {position: sample for position, sample in taken if position in wanted}
    return [found[position] for position in positions]


def read(dataset: Any, position: int) -> Any:
    """One sample of a dataset. Raises TaskError with its position where it cannot be read."""
    with user_code(f"reading sample {position} of your train_dataset", _ADVICE):
        return dataset[position]


def read_stream(dataset: Any) -> Iterator[tuple[int, Any]]:
    """The samples of a stream, counted from 0. Raises TaskError with the position of one that cannot be read."""
    with user_code("beginning to read your train_dataset"):
        stream = iter(dataset)
    for position in itertools.count():
        with user_code(f"reading sample {position} of your train_dataset", _ADVICE):
            try:
                sample = next(stream)
            except StopIteration:
                return
        yield position, sample


def width(sample: Any) -> int:
    """Number of elements of a sample. Elements of tensors and arrays, numbers and characters count one each."""
    from autotune.task.batches import contents

    if isinstance(sample, str | bytes):
        return len(sample)
    if callable(numel := getattr(sample, "numel", None)):
        return int(numel())
    if parts := contents(sample):
        return sum(map(width, parts.values()))
    size = getattr(sample, "size", 1)  # a numpy array's elements, or an image's width and height
    if isinstance(size, tuple):
        return int(size[0] * size[1])
    return size if isinstance(size, int) else 1


def is_stream(dataset: Any) -> bool:
    """Whether the dataset gives its samples one after the other, in an order of its own."""
    return isinstance(dataset, torch.utils.data.IterableDataset)
