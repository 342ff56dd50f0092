"""What a LightningModule finds where its trainer would be, in a process that has none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from autotune.lazy import torch


class SilentLogger:
    """A logger, and its `experiment`, that keeps nothing. It reads tensors as TensorBoard does, and fails on dtypes that fail there."""

    def __getattr__(self, name: str) -> SilentLogger:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, index: Any) -> SilentLogger:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        self(value)

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, item: Any) -> bool:
        return False

    def __fspath__(self) -> str:
        return os.curdir

    def __call__(self, *args: Any, **kwargs: Any) -> SilentLogger:
        """Do nothing with the arguments."""
        for value in (*args, *kwargs.values()):
            if type(value) in (torch.Tensor, torch.nn.Parameter):  # no traced one (of another type): it has no values
                _read(value)
        return self


def _read(tensor: torch.Tensor) -> None:
    """Make an array of a tensor, as torch's own writer for TensorBoard or else tensorboardX does. Raises TypeError."""
    if tensor.dtype == torch.bfloat16 and find_spec("tensorboard") is not None:
        tensor = tensor.to(torch.float16)
    np.asarray(tensor.detach().cpu())


@dataclass(eq=False)
class TrainerStandIn:
    """The attributes of `lightning.Trainer` that modules read, as they are while it trains. The defaults are a Trainer's own.

    Attributes:
        num_training_batches: micro batches of an epoch.
        estimated_stepping_batches: optimizer steps of the whole training; learning-rate schedules are made for as many.
        loggers: what `self.logger` and `self.loggers` are.
        num_batches: micro batches trained on so far.
        global_step: optimizer steps so far.
    """

    max_epochs: int = 1000
    max_steps: int = -1
    num_training_batches: float = 1
    estimated_stepping_batches: float = 1000
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    log_every_n_steps: int = 50
    check_val_every_n_epoch: int | None = 1
    default_root_dir: str = "."
    precision: str = "32-true"
    loggers: Sequence[Any] = field(default_factory=lambda: [SilentLogger()])
    optimizers: Sequence[Any] = ()
    lr_schedulers: Sequence[Any] = ()
    current_epoch: int = 0
    num_batches: int = 0
    global_step: int = 0
    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    num_devices: int = 1
    num_nodes: int = 1
    is_global_zero: bool = True
    training: bool = True
    validating: bool = False
    testing: bool = False
    predicting: bool = False
    sanity_checking: bool = False
    fast_dev_run: bool = False
    callbacks: Sequence[Any] = ()
    callback_metrics: Mapping[str, Any] = field(default_factory=dict)
    logged_metrics: Mapping[str, Any] = field(default_factory=dict)
    progress_bar_callback: None = None

    @property
    def logger(self) -> Any:
        """The first logger; None where the trainer has none."""
        return next(iter(self.loggers), None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"autotune runs the module without Lightning's Trainer, and has no trainer.{name} for it: give the module what "
            f"it needs as an argument, or let it do without (hasattr(self.trainer, {name!r}))"
        )

    def attach(self, module: Any) -> None:
        """Become the trainer of a LightningModule. Its `log` calls do nothing, `clip_gradients` clips."""
        module._trainer = self
        module.log = module.log_dict = _log_nothing
        module.clip_gradients = self._clip_gradients
        module.optimizers, module.lr_schedulers = self._optimizers, self._lr_schedulers

    def __getstate__(self) -> dict[str, Any]:
        """The state without optimizers: a module's copy has none, as copying one would copy its state."""
        return {**self.__dict__, "optimizers": (), "lr_schedulers": ()}

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return _one_or_all(self.optimizers)

    def _lr_schedulers(self) -> Any:
        return _one_or_all(self.lr_schedulers)

    def _clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        value = self.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if value and (gradient_clip_algorithm or self.gradient_clip_algorithm) == "value":
            torch.nn.utils.clip_grad_value_(parameters, value)
        elif value:
            torch.nn.utils.clip_grad_norm_(parameters, value)


def _one_or_all(made: Sequence[Any]) -> Any:
    return made if len(made) > 1 else next(iter(made), None)


def _log_nothing(*_args: Any, **_kwargs: Any) -> None:
    return None
