"""The batches that a probe trains on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.errors import TaskError
from autotune.session import Session
from autotune.task.batches import StepBatch, num_samples

NUM_PREPARED = 4  # micro batches made ahead of the timing where there is no dataset


def micro_batches(session: Session) -> Iterator[Any]:
    """Full micro batches without end: from the data loader if there is a dataset, so that loading is timed, else prepared ones."""
    if session.task.dataset() is None:
        prepared = [session.task.batch(session.config.batch_size) for _ in range(NUM_PREPARED)]
        while True:
            yield from prepared
    found = True
    while found:
        found = False
        for micro in session.loader.micro_batches():
            if num_samples(micro) >= session.config.batch_size:  # an epoch's last one may be smaller
                found = True
                yield micro
    raise TaskError(
        f"a pass over train_dataset gives no batch of {session.config.batch_size} samples; expected at least one: "
        "choose a smaller batch_size, or give more data"
    )


def largest_step_batch(session: Session, num_micro: int) -> StepBatch:
    """A batch of the largest shape that training meets: from the task's `make_batch`, or its widest samples."""
    batch = session.task.batch(session.config.batch_size)
    return StepBatch([batch] * num_micro)
