"""Finds where a training step first made a value that is not finite: which module, forward or backward.

A probe that met such a value is run once more from the same seed, now watched. The first run cannot tell: its parameters are
spoilt by then, and watching it would wait for the device at each module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autotune.devices import Device
from autotune.probe.finite import dense_values, is_finite
from autotune.probe.measure import Run
from autotune.probe.module_times import graph_nodes
from autotune.randomness import seed_everything
from autotune.records.config import Choice, ProbeSettings
from autotune.records.outcome import BACKWARD, FORWARD, INPUT, LOSS, Overflow, Progress
from autotune.recovery import RAISE
from autotune.session import Session, prepare
from autotune.task import Task
from autotune.task.batches import map_tensors, tensors

NAN, INFINITY, MINUS_INFINITY = "nan", "inf", "-inf"
_CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class _Stop(Exception):
    """Ends the run, because enough is known or it takes too long."""


def first_overflow(
    task: Task,
    config: Mapping[str, Choice],
    device: Device,
    settings: ProbeSettings,
    report: Callable[[Progress], None],
    before: Progress,
    until_s: float,
) -> Overflow | None:
    """Run a probe that met a value that was not finite again, and watch its modules.

    Args:
        task, config, device, settings, report: those of the probe.
        before: how far the probe had come; this run's progress is added to it.
        until_s: the run is given up when `time.perf_counter` passes this.

    Returns:
        Where such a value first arose; None where none arose again in time.
    """

    def report_both(progress: Progress) -> None:
        train_s, num_micro_steps = before.train_s + progress.train_s, before.num_micro_steps + progress.num_micro_steps
        report(replace(progress, train_s=train_s, num_micro_steps=num_micro_steps, samples_per_s_high=None))

    seed_everything(settings.seed)
    session = prepare(task, config, device=device, world=settings.world, on_oom=RAISE)
    run = Run(session, device, settings, report_both)
    watch = _Watch(session, run, until_s)
    try:
        run.measure(0.0)
    except Exception:
        return watch.found
    return None


class _Watch:
    """Watches the modules of a session's model, and the steps.

    Infinities in a step whose loss and gradients are finite are harmless: masks have them. With a gradient scaler, gradients
    overflow until its scale fits, so an overflow in a backward pass counts only if it happens in the last step.

    Attributes:
        found: the first such value of the step that runs now, or ran last.
    """

    def __init__(self, session: Session, run: Run, until_s: float) -> None:
        self.found: Overflow | None = None
        self._session, self._run, self._until_s = session, run, until_s
        self._name_of = {module: name for name, module in session.model.named_modules()}
        self._running: list[tuple[torch.nn.Module, int, str]] = []  # module, its first node's number, what it was given
        self._calls: list[tuple[int, int, torch.nn.Module]] = []  # how many nodes, the first node's number, module
        self._culprit: torch.nn.Module | None = None  # is tried in fp32 when its call ends
        self._suspect: torch.nn.Module | None = None  # made minus infinity: a mask, perhaps
        self._watching = False
        self._is_over = False  # whether the step that `found` belongs to has ended
        for module in self._name_of:
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            module.register_forward_hook(self._after, with_kwargs=True)
        self._update, session.update = session.update, self._end_step  # type: ignore[method-assign]
        if session.task.takes_whole_steps:
            session.accumulate = partial(self._watched, session.accumulate)  # type: ignore[method-assign]
        else:
            session.loss = partial(self._loss, session.loss)  # type: ignore[method-assign]

    def _watched(self, call: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        if time.perf_counter() > self._until_s:
            self.found = None
            raise _Stop
        if self._is_over:
            self.found = self._suspect = None
        self._running, self._calls, self._watching, self._is_over = [], [], True, False
        try:
            return call(batch)
        finally:
            self._watching = False

    def _loss(self, call: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        loss = self._watched(call, batch)
        if self.found is None and (value := _worst(loss)):
            self.found = Overflow(phase=LOSS, value=value)
        if self.found is None:
            for node in graph_nodes(loss):
                node.register_hook(partial(self._after_node, node.name(), node._sequence_nr()))
        return loss

    def _before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not self._watching:
            return
        value = _worst((args, kwargs))
        around = self._running[-1][0] if self._running else None  # the module whose own code made the value
        if value == MINUS_INFINITY:
            self._suspect = self._suspect or around
        elif value and self.found is None and around is not None:
            self._blame(around, value)
        elif value and self.found is None:
            self.found = Overflow(phase=INPUT, value=value, **self._named(module))
        self._running.append((module, _next_node(), value))

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._watching:
            return
        given, called = "", None
        while self._running and called is not module:  # skips calls that ended in an exception which the model caught
            called, first, given = self._running.pop()
        self._calls.append((_next_node() - first, first, module))
        value = _worst(output)
        if value == MINUS_INFINITY:
            self._suspect = self._suspect or module
        elif value and self.found is None:
            self._blame(self._suspect if given and self._suspect is not None else module, value)
        elif given == MINUS_INFINITY:
            self._suspect = None  # it was a mask, and the module coped with it
        if self.found is not None and self._culprit is module:
            self._culprit = None
            self.found = replace(self.found, finite_in_fp32=self._is_finite_in_fp32(module, args, kwargs))

    def _after_node(self, name: str, number: int, made: Any, given: Any) -> None:
        """A hook after a node of the graph, with the gradients that the node made and those that it was given."""
        if self.found is None and (value := _worst(made, masks=False)) and not _worst(given, masks=False):
            calls = [call for call in self._calls if call[1] <= number < call[1] + call[0]]
            inside = self._named(min(calls, key=lambda call: call[0])[2]) if calls else {}
            self.found = Overflow(phase=BACKWARD, value=value, operator=name, **inside)

    def _blame(self, module: torch.nn.Module, value: str) -> None:
        self.found = Overflow(phase=FORWARD, value=value, **self._named(module))
        self._culprit = module

    def _named(self, module: torch.nn.Module) -> dict[str, Any]:
        return {"module": self._name_of[module], "kind": type(module).__name__}

    def _is_finite_in_fp32(self, module: torch.nn.Module, args: Any, kwargs: Any) -> bool | None:
        """Whether the module's output is finite without autocast, for the same inputs; None where the module fails so."""
        self._watching = False
        try:
            with torch.no_grad(), torch.autocast(self._session.device.type, enabled=False):
                wide_args, wide_kwargs = map_tensors(_wide, (args, kwargs))
                return not _worst(module(*wide_args, **wide_kwargs), masks=False)
        except Exception:
            return None
        finally:
            self._watching = True

    def _end_step(self) -> None:
        gradients = (p.grad for p in self._session.model.parameters() if p.grad is not None)
        is_harmless = self._run.losses.are_finite and all(is_finite(dense_values(gradient)) for gradient in gradients)
        skipped = self._session.scaler is not None and (self.found is None or self.found.phase == BACKWARD)
        if not is_harmless and not skipped:  # the update would spoil the parameters
            raise _Stop
        self._update()
        self._is_over = True


def _worst(values: Any, *, masks: bool = True) -> str:
    """The worst value in some tensors: `nan`, `inf`, `-inf`; empty if all are finite.

    Args:
        masks: whether a tensor that requires no gradient may be a mask, whose `-inf` does not count.
    """
    found = {_value(tensor, masks) for tensor in tensors(values)}
    return next((value for value in (NAN, INFINITY, MINUS_INFINITY) if value in found), "")


def _value(tensor: torch.Tensor, masks: bool) -> str:
    if tensor.dtype not in _CHECKED or tensor.layout is not torch.strided or not tensor.numel():
        return ""
    low, high = float(tensor.detach().amin()), float(tensor.detach().amax())
    if math.isnan(high) or math.isnan(low):
        return NAN
    if high == math.inf:
        return INFINITY
    return MINUS_INFINITY if low == -math.inf and not (masks and not tensor.requires_grad) else ""


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _next_node() -> int:
    """The number that the next node of the autograd graph will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
