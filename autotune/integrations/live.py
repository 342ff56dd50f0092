"""A model and an optimizer that live in the user's process, as a task wants them: made anew each time."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from typing import Any

import torch

from autotune.errors import TaskError


class LiveModel:
    """Copies of a model and of its optimizer. Neither is trained on, moved or otherwise changed.

    Args:
        optimizer: of the model's parameters; its state is left behind.

    Raises:
        TaskError: the model is one of several processes', or the optimizer has parameters of something else.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            raise TaskError(f"the model is wrapped in {type(model).__name__}; give the model itself, model.module")
        self.model = model
        self._parameters = dict(model.named_parameters())
        self._optimizer = None if optimizer is None else (type(optimizer), _attributes(model, optimizer))

    def build_model(self) -> torch.nn.Module:
        """A copy, without gradients."""
        return copy.deepcopy(self.model)

    def configure_optimizers(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer, of a copy's parameters instead."""
        assert self._optimizer is not None
        kind, attributes = self._optimizer
        parameters = dict(model.named_parameters(remove_duplicate=False))
        others: dict[int, Any] = {id(own): parameters[name] for name, own in self._parameters.items()}
        others[id(self.model)] = model
        optimizer: torch.optim.Optimizer = object.__new__(kind)
        # the base class's own: it sets attributes and adds what it needs beside them
        torch.optim.Optimizer.__setstate__(optimizer, {**copy.deepcopy(attributes, others), "state": defaultdict(dict)})
        return optimizer

    def task_identity(self) -> str:
        """What distinguishes this model and optimizer from others in the same script."""
        shapes = [tuple(parameter.shape) for parameter in self.model.parameters()]
        if self._optimizer is None:
            return f"{self.model!r} {shapes}"
        kind, attributes = self._optimizer
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in attributes["param_groups"]
        ]
        return f"{self.model!r} {shapes} {kind.__module__}.{kind.__qualname__} {groups}"


def refuse_several_processes() -> None:
    """Raise TaskError where this process is one of several that train together."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    num_processes = torch.distributed.get_world_size() if distributed else int(os.environ.get("WORLD_SIZE") or 1)
    if num_processes > 1:
        raise TaskError(
            f"this process is one of {num_processes} that train together, and a search is of one device; run the script "
            "alone first (`python train.py`), and give the answer to the launched one"
        )


def _attributes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's attributes as plain data, since pickling or copying it keeps those of torch's own alone.

    Its state is left behind, and so is what others have hung on it: hooks, and the `step` of a learning-rate scheduler.
    """
    own = {id(parameter) for parameter in model.parameters()}
    known = all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    if not known:
        raise TaskError(
            f"the {type(optimizer).__name__} has parameters that the {type(model).__name__} does not have; expected an "
            "optimizer of this model alone, made after any part of the model was replaced: a loss with parameters of "
            "its own belongs into the model"
        )
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "step") and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
    }
