"""Runs a few optimizer steps with each of several configs, always from the same weights and on the same samples."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from autotune import techniques
from autotune.devices import Device
from autotune.probe.differences import Run
from autotune.probe.dropout_off import dropout_off
from autotune.probe.seed import seed_everything
from autotune.records.config import Config
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import map_tensors
from autotune.task.facts import uses_batch_statistics

SEED = 0
_MOST_SCALE_REDUCTIONS = 24  # GradScaler's 65536 halved to below 1e-2


class Runs:
    """Runs one session after another, so that the device holds one at a time.

    Attributes:
        same_masks: dropout is on, with the same masks; otherwise it is the identity.
        num_steps: optimizer steps per run.
        batch_statistics: the model of the latest run normalises over the samples of a micro batch.
    """

    def __init__(self, task: Task, device: Device, batch: Any, *, num_steps: int, same_masks: bool) -> None:
        self.task = task
        self.device = device
        self.batch = batch
        self.num_steps = num_steps
        self.same_masks = same_masks
        self.batch_statistics = False
        self._initial: tuple[list[torch.Tensor], list[torch.Tensor]] | None = (
            None  # parameters and buffers, on the host
        )

    def in_double(self) -> Runs:
        """The same runs from the same weights, with model and data in double precision."""

        def double(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        build_model = self.task.build_model
        task = dataclasses.replace(self.task, build_model=lambda: build_model().double())
        batch = map_tensors(double, self.batch)
        runs = Runs(task, self.device, batch, num_steps=self.num_steps, same_masks=self.same_masks)
        runs._initial = self._initial
        return runs

    def run(
        self, config: Config, *, seed: int = SEED, prepare_model: Callable[[torch.nn.Module], None] | None = None
    ) -> Run:
        """Take `num_steps` optimizer steps and return the results on the host. Nothing stays on the device."""
        try:
            with techniques.restored_settings():
                return self._run(config, seed, prepare_model)
        finally:
            gc.collect()
            if self.device.kind == "cuda":
                torch.cuda.empty_cache()

    def _run(self, config: Config, seed: int, prepare_model: Callable[[torch.nn.Module], None] | None) -> Run:
        seed_everything(SEED)
        session = prepare(self.task, config, device=self.device)
        model = session.model
        self.batch_statistics = uses_batch_statistics(model)
        if self._initial is None:
            self._initial = [_host(p) for p in model.parameters()], [_host(b) for b in model.buffers()]
        with nullcontext() if self.same_masks else dropout_off(model):
            for _ in range(_MOST_SCALE_REDUCTIONS):
                self._reset(model)
                if prepare_model is not None:
                    prepare_model(model)
                start = [_host(p) for p in model.parameters()] if self.num_steps > 1 else []
                seed_everything(seed)
                loss = float(session.accumulate(self._fresh_batch()))
                gradients = _gradients(session)
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
        return map_tensors(torch.clone, self.batch)

    def _reset(self, model: torch.nn.Module) -> None:
        assert self._initial is not None
        with torch.no_grad():
            for tensors, initial in zip((model.parameters(), model.buffers()), self._initial, strict=True):
                for tensor, value in zip(tensors, initial, strict=False):  # other numbers of them are found by check N
                    if tensor.shape == value.shape:
                        tensor.copy_(value)


def _gradients(session: Session) -> list[torch.Tensor]:
    """Unscaled gradients of all parameters on the host, zero where there is none."""
    scale = 1.0 if session.scaler is None else session.scaler.get_scale()
    return [
        _host(torch.zeros_like(p) if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad).div_(scale)
        for p in session.model.parameters()
        if p.requires_grad
    ]


def _names(model: torch.nn.Module) -> list[Any]:
    return [[(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()], list(model.state_dict())]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host in the default memory layout; floating tensors become at least fp32."""
    tensor = tensor.detach()
    dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


@contextmanager
def restored_randomness(device: Device) -> Iterator[None]:
    """Restore the random states of torch, Python and numpy."""
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    on_gpu = [device.torch_device] if device.kind == "cuda" else []
    try:
        with torch.random.fork_rng(devices=on_gpu):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
