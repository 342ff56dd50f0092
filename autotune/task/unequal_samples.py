"""How the samples of a training set differ: how long they are, and which are unlike all others.

Batches padded to their longest sample get wider as they get larger. A sample unlike all others is looked for where training
failed, as the sample may be the cause.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.errors import TaskError
from autotune.lazy import torch
from autotune.task import samples
from autotune.task.adapters import leaves
from autotune.task.task import Task
from autotune.task.usercode import describe, element_type, shape
from autotune.units import plural

MAX_SAMPLING_S = 1.0  # for the lengths of samples
NUM_SAMPLED = 2048
MIN_SAMPLES = 64  # fewer do not show how unequal the others are
NUM_QUANTILES = 256
PADDED = 0.95  # share of the fully padded size that a padded batch has at least
MAX_SEARCH_S = 5.0  # for odd samples
MAX_SHARE = 0.1  # of the samples looked at that may differ; where more do, unequal samples are this set's nature
MIN_LOOKED_AT = 8  # fewer tell nothing about what is usual
MAX_LOOKED_AT = 10_000
_ADVICE = "correct it, or leave it out of the dataset"


@dataclass(frozen=True)
class LengthDistribution:
    """How many elements a sample has in a batch of its own: equally likely quantiles, in increasing order."""

    quantiles: tuple[int, ...]

    def mean_width(self, batch_size: int) -> float:
        """Expected elements per sample of a micro batch, padding up to its longest sample included.

        All of `b` samples drawn at random are among the shortest share `F` with probability `F^b`.
        """
        edges = np.linspace(0.0, 1.0, len(self.quantiles) + 1) ** batch_size
        return float(np.diff(edges) @ np.array(self.quantiles, dtype=float))


def sample_lengths(task: Task, *, only_whether: bool = False) -> LengthDistribution | None:
    """Sample lengths of the task's training set, for which each sample is collated alone, within about 1 s.

    Args:
        only_whether: whether to look at no more samples than show that lengths differ.

    Returns:
        None without a training set of known size, where samples are too slow to look at, where a single sample makes no
        batch, and where the collate function does not pad to the longest.

    Raises:
        Exception: what the user's dataset or collate function raises.
    """
    from autotune.task.batches import tensors

    dataset = task.dataset()
    if dataset is None or samples.is_stream(dataset):
        return None
    collate = task.collate_fn or torch.utils.data.default_collate

    def width_of(*indices: int) -> int:
        return sum(tensor.numel() for tensor in tensors(collate([dataset[index] for index in indices])))

    num_samples = len(dataset)
    deadline = time.monotonic() + MAX_SAMPLING_S
    found: list[tuple[int, int]] = []  # (width, index)
    for index in random.Random(0).sample(range(num_samples), min(num_samples, NUM_SAMPLED)):
        found.append((width_of(index), index))
        is_known = only_whether and len(found) == MIN_SAMPLES and len({width for width, _ in found}) > 1
        if is_known or time.monotonic() > deadline:
            break
    found.sort()
    if len(found) < min(num_samples, MIN_SAMPLES) or not found or found[0][0] == 0:
        return None
    (shortest, one), (longest, other) = found[0], found[-1]
    if shortest < longest and width_of(one, other) < PADDED * 2 * longest:
        return None
    if shortest == longest:
        return LengthDistribution((longest,))
    places = np.linspace(0, len(found) - 1, min(len(found), NUM_QUANTILES)).round().astype(int)
    return LengthDistribution(tuple(found[place][0] for place in places))


def odd_sample(task: Task, raises: Callable[[Any], bool] | None = None, *, nonfinite: bool = False) -> str:
    """Which sample is unlike the others, what is usual, and what to do; empty where none stands out.

    It looks, in this order, at whether a sample can be read, its types, its shapes, with `nonfinite` its values, and whether it
    fails alone, and tells the first difference that few samples have. Reading samples ends after 5 s, and so does training on
    them.

    Args:
        raises: tells whether a training step on one sample alone raises the error that was seen; None to leave that out.
        nonfinite: whether nan or inf is what was seen.
    """
    dataset = task.dataset()
    if dataset is None:
        return ""
    words: dict[int, str] = {}  # by position, as all that follows: no sample itself is kept
    types, sizes, values = dict[int, Any](), dict[int, Any](), dict[int, Any]()
    try:
        for position, sample in _in_time(dataset):
            words[position] = describe(sample)
            types[position], sizes[position] = _structure(sample), _sizes(sample)
            values[position] = nonfinite and _is_nonfinite(sample)
    except TaskError as error:  # which names the sample
        return str(error)
    for looks in (types, sizes, values):  # the plainest difference first
        odd, usual = _few(looks)
        if odd:
            is_value = looks is values
            what = "holds nan or inf" if is_value else f"is {words[odd[0]]}"
            others = "do not" if is_value else f"are like sample {usual[0]}, {words[usual[0]]}"
            return f"{_named(odd)} {what}, and {plural(len(usual), 'other')} looked at {others}; {_ADVICE}"
    if raises is None:
        return ""
    odd, usual = _few({position: raises(sample) for position, sample in _in_time(dataset) if position in words})
    if not odd:
        return ""
    return (
        f"{_named(odd)}, {words[odd[0]]}, fails like this by itself, and {plural(len(usual), 'other')} looked at "
        f"{'does' if len(usual) == 1 else 'do'} not; {_ADVICE}"
    )


def _in_time(dataset: Any) -> Iterator[tuple[int, Any]]:
    """Samples with their positions, always in the same order, until the time is over."""
    deadline = time.monotonic() + MAX_SEARCH_S
    if samples.is_stream(dataset):
        found = samples.read_stream(dataset)
    else:
        size = len(dataset)
        drawn = random.Random(0).sample(range(size), min(size, MAX_LOOKED_AT))
        found = ((position, samples.read(dataset, position)) for position in drawn)
    for place, looked_at in enumerate(found, start=1):
        yield looked_at
        if time.monotonic() > deadline or place >= MAX_LOOKED_AT:
            return


def _few(looks: Mapping[int, Any]) -> tuple[list[int], list[int]]:
    """Positions of the few that differ from most, and of most; none of the former where these are not few."""
    by_look: dict[Any, list[int]] = {}
    for position, look in looks.items():
        by_look.setdefault(look, []).append(position)
    usual = max(by_look.values(), key=len) if by_look else []
    odd = sorted(set(looks) - set(usual))
    few = len(looks) >= MIN_LOOKED_AT and len(odd) <= max(1, MAX_SHARE * len(looks))
    return (odd, sorted(usual)) if few else ([], usual)


def _named(positions: list[int]) -> str:
    more = f" (and {len(positions) - 1} more)" if len(positions) > 1 else ""
    return f"sample {positions[0]}{more} of your train_dataset"


def _structure(sample: Any) -> Any:
    """The types in a sample, without its sizes and values."""
    if isinstance(sample, torch.Tensor):
        return element_type(sample), sample.dim()
    if isinstance(sample, Mapping):
        return tuple(sorted((str(key), _structure(part)) for key, part in sample.items()))
    if isinstance(sample, tuple):
        return tuple(map(_structure, sample))
    if isinstance(sample, list):  # of any length, as tokens are
        return list.__name__, *itertools.islice(map(_structure, sample), 1)
    return type(sample).__name__, str(getattr(sample, "dtype", "")), getattr(sample, "ndim", 0)


def _sizes(sample: Any) -> Any:
    """The shapes in a sample."""
    if isinstance(sample, torch.Tensor):
        return shape(sample)
    if isinstance(sample, Mapping):
        return tuple(sorted((str(key), str(_sizes(part))) for key, part in sample.items()))
    if isinstance(sample, tuple | list):
        return tuple(map(_sizes, sample)) if isinstance(sample, tuple) else len(sample)
    return str(getattr(sample, "shape", ""))


def _is_nonfinite(sample: Any) -> bool:
    """Whether a number, a tensor or an array in a sample is nan or inf."""
    for part in leaves(sample):
        if isinstance(part, float) and not math.isfinite(part):
            return True
        with contextlib.suppress(Exception):  # other values are passed over
            values = part if isinstance(part, torch.Tensor) else torch.from_numpy(part)
            if not torch.isfinite(values).all():
                return True
    return False
