"""Training loops of the user's own: a task of a model, a DataLoader, a loss and an optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler

from autotune.errors import TaskError
from autotune.integrations.live import LiveModel
from autotune.integrations.words import read
from autotune.records.batch_plan import ACCUMULATION, BATCH_SIZE
from autotune.records.config import Choice
from autotune.task import Task
from autotune.task.describe import describe
from autotune.techniques.frameworks import DATALOADER

_OPTIONS = tuple(inspect.signature(DataLoader).parameters)


def task_of(
    model: torch.nn.Module,
    loader: DataLoader[Any],
    loss: Callable[..., torch.Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    **fields: Any,
) -> Task:
    """`Task.from_loader`."""
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"the model is {describe(model)}; expected a torch.nn.Module")
    for part in (loader, optimizer):
        if type(part).__module__.startswith("accelerate."):
            raise TaskError(
                f"the {type(part).__name__} was prepared by Accelerate; make the task before accelerator.prepare(...)"
            )
    live = LiveModel(model, optimizer)
    criterion = None if loss is None else Criterion(loss)
    baseline = baseline_of(loader)
    made: dict[str, Any] = {
        "build_model": live.build_model,
        "training_step": None if criterion is None else criterion.training_step,
        "loss_weight": criterion.weight if criterion is not None and criterion.ignored is not None else None,
        "configure_optimizers": None if optimizer is None else live.configure_optimizers,
        **data_of(loader),
        "baseline": {**baseline, **fields.pop("baseline", {})},
        "global_batch": baseline[BATCH_SIZE],
        "name": type(model).__name__,
    }
    steps = made["baseline"].get(ACCUMULATION, 1)
    made["global_batch"] = int(made["baseline"][BATCH_SIZE]) * int(steps)
    return Task(**{**made, **fields})


def data_of(loader: Any) -> dict[str, Any]:
    """The fields of a task for a loader's data. The loader is not read from.

    Raises:
        TaskError: it is no DataLoader, or makes its batches itself.
    """
    if not isinstance(loader, DataLoader):
        raise TaskError(f"the loader is {describe(loader)}; expected one torch.utils.data.DataLoader")
    if loader.batch_size is None:
        raise TaskError(
            "the DataLoader makes its batches by a batch_sampler or takes them from the dataset as they are, so that "
            "no other batch size can be tried; give one with a batch_size"
        )
    warnings: tuple[str, ...] = ()
    if not isinstance(loader.sampler, RandomSampler | SequentialSampler | _InfiniteConstantSampler):
        warnings = (
            f"the DataLoader's {type(loader.sampler).__name__} was not used: probes draw samples in random order",
        )
    return {
        "train_dataset": partial(_same, loader.dataset),
        "collate_fn": loader.collate_fn,
        "warnings": warnings,
    }


def baseline_of(loader: DataLoader[Any]) -> dict[str, Choice]:
    """A loader's batch size and options as a partial config."""
    given = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    return read(DATALOADER, given)


class Criterion:
    """A loss of the model's output and a target: the batch's last element is the target, the others the model's inputs."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self._loss = copy.deepcopy(loss) if isinstance(loss, torch.nn.Module) else loss  # is moved to where targets are
        self.ignored: int | None = getattr(loss, "ignore_index", None)

    def training_step(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """The loss of a batch."""
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise TaskError(
                f"a batch of the loader is {describe(batch)}, of which `loss` cannot be told what is the target; expected "
                "inputs and a target; else give training_step=lambda model, batch: ... in place of loss"
            )
        *inputs, target = batch
        if isinstance(self._loss, torch.nn.Module):
            self._loss.to(target.device)  # with the weights of classes, say
        return self._loss(model(*inputs), target)

    def weight(self, batch: Any) -> float:
        """How many targets the mean is over; where classes have weights, the sum of the targets' weights."""
        target = batch[-1]
        counts = target.ne(self.ignored)
        weights = getattr(self._loss, "weight", None)
        if isinstance(weights, torch.Tensor) and weights.dim() == 1 and not target.is_floating_point():
            return float(weights.to(target.device)[target[counts]].sum())
        return float(counts.sum())

    def task_identity(self) -> str:
        """What tells this loss from others in the same script."""
        return repr(self._loss)


def _same(dataset: Any) -> Any:
    return dataset
