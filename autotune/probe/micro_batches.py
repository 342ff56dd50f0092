"""The batches that a probe trains on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from autotune.devices import capabilities_of
from autotune.errors import TaskError
from autotune.session import Session
from autotune.task.batches import map_tensors, num_bytes, tensors
from autotune.units import GIB, plural

NUM_PREPARED = 4  # micro batches made ahead of the timing where there is no dataset
PREPARED_BYTES = GIB  # of host memory that they take together, if one does not take more


class TooFewSamplesError(TaskError):
    """A pass over the training set gives no batch as large as the config's."""


def micro_batches(session: Session) -> Iterator[tuple[Any, int]]:
    """Full micro batches without end, and their size.

    They come from the data loader if there is a dataset, so that loading is timed; else prepared ones are repeated.
    """
    if session.task.dataset() is None:
        yield from itertools.cycle(_prepare_batches(session))
    found = True
    while found:
        found = False
        for micro, num_samples in session.loader.micro_batches():
            if num_samples >= session.config.batch_size:  # an epoch's last one may be smaller
                found = True
                yield micro, num_samples
    raise TooFewSamplesError(
        f"a pass over train_dataset gives no batch of {plural(session.config.batch_size, 'sample')}; expected at least one: "
        "choose a smaller batch_size, or give more data"
    )


def _prepare_batches(session: Session) -> list[tuple[Any, int]]:
    """Some batches, few where they are large; for a GPU in page-locked memory, as a data loader that keeps up would hand them over."""
    batches = session.loader.micro_batches()
    first = next(batches)
    first_bytes = sum(map(num_bytes, tensors(first[0])))
    number = max(1, min(NUM_PREPARED, PREPARED_BYTES // max(1, first_bytes)))
    prepared = [first, *itertools.islice(batches, number - 1)]
    if capabilities_of(session.device.type).page_locked:
        with contextlib.suppress(RuntimeError):  # the host allows no more of it
            return [(map_tensors(torch.Tensor.pin_memory, micro), size) for micro, size in prepared]
    return prepared
