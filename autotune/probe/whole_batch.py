"""What comes of a batch that must not be cut: the inspection's comparison, and the baseline that it leaves."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autotune.coupling.compare import find_coupling
from autotune.coupling.samples import TypicalSamples
from autotune.devices import Device
from autotune.records.batch_plan import ACCUMULATION, BATCH_SIZE, BatchPlan, share_of
from autotune.records.config import Config
from autotune.records.coupling import Coupling
from autotune.records.inspection import BatchSupport
from autotune.records.world import ALONE, World
from autotune.task import Task


def coupling_of(
    task: Task,
    model: torch.nn.Module,
    device: Device,
    plan: BatchPlan,
    *,
    legal: int,
    step_s: float | None,
    comparing_s: float,
) -> Coupling | None:
    """Whether micro batches give the gradient of the task's whole batch; None where a step is one unit of the user's own.

    Args:
        model: on the device, which nothing else has trained.
        plan: the baseline's, which says what a whole batch is where the task does not.
        legal, step_s: samples and seconds of a step that was taken; None where memory was short for it.
        comparing_s: after which no larger batch is compared.
    """
    if task.takes_whole_steps:
        return None
    whole = plan.batch_size if task.global_batch is None else share_of(task.global_batch, plan.world)
    size = task.dataset_size()
    return find_coupling(
        task,
        model,
        device,
        TypicalSamples(task),
        most=whole if size is None else min(whole, size),
        seconds=comparing_s,
        legal=legal,
        sample_s=(step_s or 0.0) / legal,
    )


def uncut(
    task: Task, baseline: Config, coupling: Coupling | None, dataset_size: int | None, world: World = ALONE
) -> Config:
    """The baseline with a process's whole share of the global batch at once, where it may not be cut and the user does not say how
    it is.
    """
    whole = None if task.global_batch is None else share_of(task.global_batch, world)
    if coupling is None or coupling.may_be_cut or whole is None or (dataset_size or whole) < whole:
        return baseline
    says = BATCH_SIZE in (task.baseline or {}) or task.loader_batch_size() is not None
    return baseline if says else baseline.replace(**{BATCH_SIZE: whole, ACCUMULATION: 1})


def warnings_of(batch: BatchSupport) -> Iterator[str]:
    """What of that belongs into every answer."""
    if batch.stays_whole:
        yield batch.reason
    elif batch.optional_sizes:
        yield batch.sizes_reason
