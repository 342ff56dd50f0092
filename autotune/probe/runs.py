"""Runs a few optimizer steps with each of several configs, always from the same weights and on the same samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from autotune.coupling.dropout_off import RandomDraws, dropout_off
from autotune.devices import Device
from autotune.devices.oom import give_back
from autotune.probe.differences import Run
from autotune.probe.exact_convolutions import exact_convolutions
from autotune.probe.seed import seed_everything
from autotune.records.config import Config
from autotune.recovery import RAISE
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import fresh_copy, map_tensors
from autotune.task.facts import uses_batch_statistics
from autotune.techniques import Techniques

SEED = 0
_MOST_SCALE_REDUCTIONS = 24  # GradScaler's 65536 halved to below 1e-2


@dataclasses.dataclass
class Runs:
    """Runs one session after another, so that the device holds one at a time.

    Attributes:
        techniques: whose settings are put back after each run.
        num_steps: optimizer steps per run.
        same_masks: dropout is on, with the same masks; otherwise it is the identity.
        batch_statistics: the model of the latest run normalises over the samples of a micro batch.
    """

    task: Task
    device: Device
    batch: Any
    techniques: Techniques
    num_steps: int
    same_masks: bool
    batch_statistics: bool = False
    _initial: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None  # parameters and buffers, on the host

    def in_double(self) -> Runs:
        """The same runs from the same weights, with model and data in double precision."""

        def double(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        build_model = self.task.build_model
        task = dataclasses.replace(self.task, build_model=lambda *variant: build_model(*variant).double())
        return dataclasses.replace(self, task=task, batch=map_tensors(double, self.batch))

    def run(
        self,
        config: Config,
        *,
        seed: int = SEED,
        prepare_model: Callable[[torch.nn.Module], None] | None = None,
        draws: RandomDraws | None = None,
    ) -> Run:
        """Take `num_steps` optimizer steps, watched by `draws`, and return the results on the host. Nothing stays on the device."""
        try:
            with self.techniques.keep_settings(), exact_convolutions():
                return self._run(config, seed, prepare_model, draws)
        finally:
            give_back(self.device)

    def _run(
        self,
        config: Config,
        seed: int,
        prepare_model: Callable[[torch.nn.Module], None] | None,
        draws: RandomDraws | None,
    ) -> Run:
        seed_everything(SEED)
        session = prepare(self.task, config, device=self.device, on_oom=RAISE)
        model = session.model
        self.batch_statistics = uses_batch_statistics(model)
        if self._initial is None:
            self._initial = [_host(p) for p in model.parameters()], [_host(b) for b in model.buffers()]
        with nullcontext() if self.same_masks else dropout_off(model), draws or nullcontext():
            for _ in range(_MOST_SCALE_REDUCTIONS):
                self._reset(model)
                if prepare_model is not None:
                    prepare_model(model)
                start = [_host(p) for p in model.parameters()] if self.num_steps > 1 else []
                seed_everything(seed)
                with _gradients(session) as gradients:
                    loss = float(session.accumulate(self._fresh_batch()))
                session.update()
                # GradScaler starts too high on purpose and skips steps, halving its scale, until nothing overflows.
                if session.scaler is None or all(bool(g.isfinite().all()) for g in gradients):
                    break
            buffers = [[_host(b) for b in module.buffers(recurse=False)] for module in model.modules()]
            for _ in range(self.num_steps - 1):
                session.step(self._fresh_batch())
        movement = [_host(p).sub_(before) for p, before in zip(model.parameters(), start, strict=False)]
        return Run(loss=loss, gradients=gradients, buffers=buffers, movement=movement, names=_names(model))

    def _fresh_batch(self) -> Any:
        """A copy, for models that change their input in place."""
        return fresh_copy(self.batch)

    def _reset(self, model: torch.nn.Module) -> None:
        assert self._initial is not None
        with torch.no_grad():
            for tensors, initial in zip((model.parameters(), model.buffers()), self._initial, strict=True):
                for tensor, value in zip(tensors, initial, strict=False):  # other numbers of them are found by check N
                    if tensor.shape == value.shape:
                        tensor.copy_(value)


@contextmanager
def _gradients(session: Session) -> Iterator[list[torch.Tensor]]:
    """Unscaled gradients of all parameters on the host, zero where there is none, as they come in the backward pass.

    A technique may use them up there.
    """
    scale = 1.0 if session.scaler is None else session.scaler.get_scale()
    parameters = [parameter for parameter in session.model.parameters() if parameter.requires_grad]
    gradients = [_host(torch.zeros_like(parameter)) for parameter in parameters]

    def add(number: int, found: torch.Tensor) -> None:
        gradients[number] += _host(found.to_dense() if found.is_sparse else found).div_(scale)

    hooks = [parameter.register_hook(partial(add, number)) for number, parameter in enumerate(parameters)]
    try:
        yield gradients
    finally:
        for hook in hooks:
            hook.remove()


def _names(model: torch.nn.Module) -> list[Any]:
    return [[(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()], list(model.state_dict())]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host in the default memory layout; floating tensors become at least fp32."""
    tensor = tensor.detach()
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
