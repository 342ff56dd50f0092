"""A model and an optimizer that live in the user's process, as a task wants them: made anew each time."""

from __future__ import annotations

import copy
import os
from collections import defaultdict

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
        self._optimizer = None if optimizer is None else _by_names(model, optimizer)

    def build_model(self) -> torch.nn.Module:
        """A copy, without gradients."""
        return copy.deepcopy(self.model)

    def configure_optimizers(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer, of a copy's parameters instead."""
        assert self._optimizer is not None
        parameters = dict(model.named_parameters(remove_duplicate=False))
        optimizer: torch.optim.Optimizer = copy.copy(self._optimizer)
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [
            {**group, "params": [parameters[name] for name in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        return optimizer


def refuse_several_processes() -> None:
    """Raise TaskError where this process is one of several that train together."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    num_processes = torch.distributed.get_world_size() if distributed else int(os.environ.get("WORLD_SIZE") or 1)
    if num_processes > 1:
        raise TaskError(
            f"this process is one of {num_processes} that train together, and a search is of one device; run the script "
            "alone first (`python train.py`), and give the answer to the launched one"
        )


def _by_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer without state, and with the names of the parameters in place of them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = all(id(parameter) in names for group in optimizer.param_groups for parameter in group["params"])
    if not known:
        raise TaskError(
            f"the {type(optimizer).__name__} has parameters that the {type(model).__name__} does not have; expected an "
            "optimizer of this model alone, made after any part of the model was replaced: a loss with parameters of "
            "its own belongs into the model"
        )
    nameless = copy.copy(optimizer)
    nameless.state = defaultdict(dict)
    nameless.param_groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return nameless
