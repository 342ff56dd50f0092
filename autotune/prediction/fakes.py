"""A task whose models have shapes and types and no values: nothing large is allocated, however many parameters there are."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes

from autotune.devices import Device, capabilities_of
from autotune.devices.kernels.workspaces import hidden_allocations
from autotune.devices.targets import Target, target_of
from autotune.errors import AutotuneError, TaskError, first_line, in_one_line
from autotune.prediction.fake_run import OneFakeMode, SmallValues, fake_build, fake_run, to_fake, without_filling
from autotune.prediction.storages import StorageTracker
from autotune.probe.inspection import Untrained, inspect_task
from autotune.task import Task
from autotune.task.batches import map_tensors
from autotune.task.usercode import is_allocation_failure, user_place
from autotune.techniques import Techniques, find_techniques
from autotune.units import format_bytes

_NO_DATA = ("its data is not allocated yet", "doesn't have storage")  # what torch says of a fake tensor's values


class Fakes:
    """Builds a task's models on fake tensors, and runs code on them.

    Small tensors have values while a model is built. Where `build_model` needs those of others, the model is built for real,
    once, and its values are dropped.

    Args:
        task: the user's task.
        target: the kind of device to behave like.
        techniques: whose settings are put back after each run.
        host_bytes: what this process may take of the host's memory; None where nothing bounds it.

    Attributes:
        task: the same task, whose models are built so. Its data stay real.
        mode: of all the fake tensors.
        why_real: why the model was built for real, and at which line; empty where it was not.
    """

    def __init__(self, task: Task, target: Target, techniques: Techniques, host_bytes: int | None = None) -> None:
        moves = capabilities_of(target).own_memory

        @functools.wraps(task.build_model)
        def build_model(*variant: str) -> Any:
            model = self._build(*variant)
            if self._tracker is not None and moves and isinstance(model, torch.nn.Module):
                self._tracker.begin_with(_as_moved(model))  # it is built on the host
            return model

        self.task = task.with_other_models(build_model=build_model)
        self.mode = OneFakeMode(allow_non_fake_inputs=True)
        self.why_real = ""
        self._target = target
        self._techniques = techniques
        self._host_bytes = host_bytes
        self._build_model = task.build_model
        self._tracker: StorageTracker | None = None  # while something runs
        self._without_values: set[tuple[str, ...]] = set()  # variants that can be built so
        self._emptied: dict[tuple[str, ...], Any] = {}  # variant -> what was built for real, without its values

    @contextmanager
    def run(self) -> Iterator[StorageTracker]:
        """Run on fake tensors, as on a device of the kind `target`. Where values are read, plausible ones stand in."""
        tracker = StorageTracker(hidden_allocations(self._target))
        with fake_run(self.mode, self._target, self._techniques), tracker:
            self._tracker = tracker
            try:
                yield tracker
            finally:
                self._tracker = None

    def inputs(self, batch: Any) -> Any:
        """Fake tensors of the batch's shapes."""
        with _disable_current_modes():
            return map_tensors(self.mode.from_tensor, batch)

    def _build(self, *variant: str) -> Any:
        """In place of the task's `build_model`."""
        if variant in self._emptied:
            with contextlib.suppress(Exception):  # some modules cannot be copied
                return copy.deepcopy(self._emptied[variant])
            return self._empty(variant)
        if self._tracker is not None and variant in self._without_values:
            with without_filling(), SmallValues():
                return self._build_model(*variant)
        with _disable_current_modes():  # where values are only plausible, what reads them would go unseen
            try:
                with fake_build(self.mode), SmallValues():
                    model = self._build_model(*variant)
            except Exception as error:
                if is_allocation_failure(error):
                    raise
                self.why_real = why_values_are_needed(error) + user_place(error)
                self._emptied[variant] = self._empty(variant)
                return self._build(*variant)
        self._without_values.add(variant)
        return model

    def _empty(self, variant: tuple[str, ...]) -> Any:
        """The model built for real, without its values."""
        with _disable_current_modes():
            try:
                model = self._build_model(*variant)
            except Exception as error:
                if not is_allocation_failure(error):
                    raise
            else:
                return to_fake(model, self.mode) if isinstance(model, torch.nn.Module) else model
        bound = "" if self._host_bytes is None else f" ({format_bytes(self._host_bytes)} of it were free)"
        # not raised from the failed allocation, which would be taken for the device's
        raise TaskError(
            f"the host has too little memory to build the model{bound}, whatever the device that is asked about. It had to be "
            f"built for real, since {self.why_real}; let build_model read no values of tensors (plain numbers in their "
            "place, weights loaded elsewhere), or predict on a host with more memory"
        )


def inspect_untrained(task: Task, *, device: Device, host_bytes: int, **arguments: Any) -> dict[str, Any]:
    """Inspect a task without training it: as `inspect_task`, but no model is built for real unless its code needs values.

    Args:
        device: this machine's CPU, or an `AbsentGpu`.
        host_bytes: what this process may take of the host's memory.
    """
    fakes = Fakes(task, target_of(device.info()), find_techniques(), host_bytes)
    found = inspect_task(fakes.task, device=device, untrained=Untrained(fakes.run, fakes.inputs), **arguments)
    return found | {"built_for_real": fakes.why_real}


def _as_moved(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers in the order in which `Module.to` moves them."""
    for child in model.children():
        yield from _as_moved(child)
    yield from (tensor for tensor in (*model._parameters.values(), *model._buffers.values()) if tensor is not None)


def why_values_are_needed(error: Exception) -> str:
    """Why code on fake tensors raised an exception, in one line and without a full stop."""
    if isinstance(error, DynamicOutputShapeException | DataDependentOutputException):
        return f"what {error.func} returns depends on the values of a tensor"
    if any(sign in first_line(error) for sign in _NO_DATA):
        return "an operator of it reads the values of a tensor"
    message = first_line(error) if isinstance(error, AutotuneError) else in_one_line(error)
    return f"without the values of tensors it raises {message}"[:300].removesuffix(".")
