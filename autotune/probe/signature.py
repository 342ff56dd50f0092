"""What a task's model is made of, read from its modules."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from autotune.lazy import torch
from autotune.records.signature import Layer, LossKind, ModelSignature
from autotune.task import adapters, losses

if TYPE_CHECKING:
    from autotune.task.task import Task


def signature_of(task: Task, model: torch.nn.Module, batch: Any) -> ModelSignature:
    """The signature of a task's model.

    Args:
        batch: a small one, whose targets say which loss is the default.
    """
    parameters = list(model.parameters())
    return ModelSignature(
        layers=_layers(model),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        dtypes=tuple(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})),
        loss=_loss_kind(task, model, batch),
    )


def _layers(model: torch.nn.Module) -> tuple[Layer, ...]:
    found: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
    for module in model.modules():
        shapes = tuple(tuple(parameter.shape) for parameter in module.parameters(recurse=False))
        if shapes or not any(True for _ in module.children()):
            found[type(module).__name__, shapes] += 1
    return tuple(Layer(kind=kind, shapes=shapes, count=count) for (kind, shapes), count in sorted(found.items()))


def _loss_kind(task: Task, model: torch.nn.Module, batch: Any) -> LossKind:
    if task.takes_whole_steps:
        return LossKind.WHOLE_STEP
    if task.training_step is not None:
        return LossKind.OWN
    return LossKind.MODULE if adapters.is_lightning(model) else losses.default_kind(batch)
