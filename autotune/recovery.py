"""A step that runs out of memory is taken again in smaller micro batches, as if the first attempt had not been.

A probe sees seconds, a run hours: an input longer than any before, or a neighbour on the device, may need memory that was
there when the config was measured.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, Protocol

import torch

from autotune.devices.oom import attempted_bytes
from autotune.devices.randomness import RandomState
from autotune.task.batches import CannotCutError, StepBatch, num_bytes, split, tensors
from autotune.task.facts import uses_batch_statistics
from autotune.techniques.build import Build
from autotune.units import format_bytes, plural

HALVE: Literal["halve"] = "halve"  # what `prepare` takes as `on_oom`
RAISE: Literal["raise"] = "raise"
_LOG = logging.getLogger("autotune")


class Halves(Protocol):
    """The two halves of a step, as `Session` has them."""

    position: int  # of the micro batch that `accumulate` has come to

    def accumulate(self, batch: Any) -> torch.Tensor:
        """Add the gradient of the mean loss over `batch` to the parameters' gradients."""

    def update(self) -> None:
        """Update the parameters, and clear the gradients."""


class Recovery:
    """Takes the steps of one session.

    Before a step it takes note of what the step will change: the random state, and the buffers that forward passes were
    seen to change. Nothing is copied from a GPU for that, and nothing waits for it, but in the first step, which copies all
    buffers to the host to see which of them change.

    What ran out of memory is remembered by its bytes: from then on each micro batch of as many bytes or more is halved until
    it has fewer. So a rare long input costs the others nothing, and a neighbour who stays costs no failed attempt each step.
    """

    def __init__(self, build: Build) -> None:
        self._device = build.device
        self._task = build.task
        self._model = build.model
        self._parameters = tuple(build.model.parameters())
        self._buffers = _Buffers(build.model)
        self._too_large_bytes = math.inf
        self._never = build.unrepeatable or build.one_micro_batch
        if build.task.takes_whole_steps:
            self._never = "the task's own step is one unit, which may have updated parameters already"
        elif uses_batch_statistics(build.model):
            self._never = _BATCH_STATISTICS

    def step(self, session: Halves, micro_batches: StepBatch) -> torch.Tensor:
        """Take one optimizer step, in smaller micro batches where these do not fit; returns the loss, as `Session.step` does.

        Raises:
            Exception: what the step raises. Out of memory that cannot be recovered from has a note that says why not.
        """
        while True:
            cut = self._cut(micro_batches)
            start = None if self._never else _Start(self, cut)
            try:
                loss = session.accumulate(cut)
                break
            except Exception as error:
                if not self._device.is_out_of_memory(error):
                    raise
                reason = self._never
                if start is not None:
                    reason = self._why_not(start) or self._remember(cut, session.position, error)
                if start is None or reason:
                    error.add_note(f"autotune cannot take the step again in smaller micro batches: {reason}")
                    raise
            self._undo(start)  # the error is gone by now, and with it the frames that held what the attempt took
        self._buffers.learn()
        try:
            session.update()
        except Exception as error:
            if self._device.is_out_of_memory(error):
                error.add_note(
                    "autotune cannot take the step again: the optimizer may have updated some parameters already; go on "
                    "from a checkpoint with a config that needs less memory"
                )
            raise
        return loss

    def _cut(self, micro_batches: StepBatch) -> StepBatch:
        """Micro batches of which none is known to be too large."""
        if self._too_large_bytes == math.inf:
            return micro_batches
        pairs = zip(micro_batches, micro_batches.sizes, strict=True)
        return StepBatch(part for micro, size in pairs for part in self._fitting(micro, size))

    def _fitting(self, micro: Any, num_samples: int) -> Iterator[tuple[Any, int]]:
        parts = StepBatch([(micro, num_samples)])
        if num_samples > 1 and _bytes_of(micro) >= self._too_large_bytes:
            with suppress(CannotCutError):
                parts = self._halves(micro, num_samples)
        for part, size in zip(parts, parts.sizes, strict=True):
            if len(parts) == 1:
                yield part, size
            else:
                yield from self._fitting(part, size)

    def _halves(self, micro: Any, num_samples: int) -> StepBatch:
        return split(micro, self._task.cuts(), -(-num_samples // 2))

    def _why_not(self, start: _Start) -> str:
        """Why what the attempt changed cannot be restored; empty where it can."""
        if start.with_gradient is not None:
            name = next((n for n, p in self._model.named_parameters() if p is start.with_gradient), "a parameter")
            return (
                f"{name} had a gradient before the step, to which this one was added; clear gradients between steps, and "
                "let no parameter require a gradient that the optimizer does not update"
            )
        if uses_batch_statistics(self._model):
            return _BATCH_STATISTICS
        if any(parameter._post_accumulate_grad_hooks for parameter in self._model.parameters()):
            return "a hook of a parameter may have used its gradient during the backward pass"
        if any(tensor._version != version for tensor, version in start.inputs):
            return "the training code changed its batch in place"
        if lost := self._buffers.lost():
            return f"the buffer {lost} changed for the first time, and its value from before was not kept"
        return ""

    def _remember(self, batch: StepBatch, position: int, error: Exception) -> str:
        """Cut micro batches as large as the one that failed from now on, and say so. Returns the reason if it cannot be cut."""
        micro, num_samples = batch[position], batch.sizes[position]
        try:
            halves = self._halves(micro, num_samples)
        except CannotCutError as cannot:
            return f"only the task itself can make smaller batches, since one holds {cannot}"
        if len(halves) == 1:
            return "one sample alone does not fit"
        self._too_large_bytes = _bytes_of(micro)
        attempted = attempted_bytes(error)
        _LOG.warning(
            "out of memory in a micro batch of %s%s: the same optimizer step is taken again in micro batches of %d, and from "
            "now on every micro batch of as much data (%s) or more is cut so; smaller ones stay whole",
            plural(num_samples, "sample"),
            f" (an allocation of {format_bytes(attempted)} failed)" if attempted else "",
            halves.sizes[0],
            format_bytes(self._too_large_bytes),
        )
        return ""

    def _undo(self, start: _Start) -> None:
        """Put everything back as it was, and give the memory that the attempt took back to the device."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._buffers.restore()
        start.random.restore()
        gc.collect()
        if self._device.kind == "cuda":
            torch.cuda.empty_cache()


_BATCH_STATISTICS = (
    "batch normalisation would see smaller micro batches, and the step would learn something else; choose a smaller "
    "batch_size"
)


class _Start:
    """What a step that begins now can be judged and undone by.

    Attributes:
        with_gradient: a parameter that has a gradient already.
        inputs: the tensors of the batch, with their versions.
        random: the random state.
    """

    def __init__(self, recovery: Recovery, batch: StepBatch) -> None:
        self.with_gradient = next((p for p in recovery._parameters if p.grad is not None), None)
        self.inputs = [(tensor, tensor._version) for tensor in tensors(batch)]
        self.random = RandomState(recovery._device.torch_device)
        recovery._buffers.note()


class _Buffers:
    """The buffers of a model, and the values that those had before a step which forward passes change.

    Which these are, the first step tells by comparing values: some code changes them behind torch's back (`buffer.data`).
    Later, a buffer that was constant until then is known to have changed by its version.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._places = [(module, name) for module in model.modules() for name in module._buffers]
        self._model = model
        self._changing: set[tuple[torch.nn.Module, str]] | None = None  # None before the first step
        self._before: dict[tuple[torch.nn.Module, str], tuple[torch.Tensor, int, torch.Tensor | None]] = {}

    def note(self) -> None:
        """Remember the buffers as they are now."""
        present = {(module, name): module._buffers.get(name) for module, name in self._places}
        if self._changing is not None:
            self._changing |= {place for place in self._before if self._has_changed(place, present[place])}
        self._before = {
            place: (buffer, buffer._version, self._copy(place, buffer))
            for place, buffer in present.items()
            if buffer is not None
        }

    def learn(self) -> None:
        """After the first step: find out which buffers it changed."""
        if self._changing is not None or not self._before:
            return
        self._changing = set()
        for place, (_, _, copy) in self._before.items():
            buffer = place[0]._buffers.get(place[1])
            if copy is None or buffer is None or self._has_changed(place, buffer) or not _equal(copy, buffer):
                self._changing.add(place)

    def lost(self) -> str:
        """A buffer that cannot be restored; empty where all can."""
        for module, name in self._before:
            buffer, version, copy = self._before[module, name]
            if copy is None and buffer._version != version:
                path = next(path for path, found in self._model.named_modules() if found is module)
                return f"{path}.{name}" if path else name
        return ""

    def restore(self) -> None:
        """Give every buffer the value that it had."""
        with torch.no_grad():
            for (module, name), (buffer, _, copy) in self._before.items():
                if copy is not None:
                    buffer.copy_(copy)
                module._buffers[name] = buffer

    def _has_changed(self, place: tuple[torch.nn.Module, str], buffer: torch.Tensor | None) -> bool:
        before, version, _ = self._before[place]
        return buffer is not before or before._version != version

    def _copy(self, place: tuple[torch.nn.Module, str], buffer: torch.Tensor) -> torch.Tensor | None:
        if self._changing is None:
            return buffer.detach().to("cpu", copy=True)
        return buffer.detach().clone() if place in self._changing else None


def _equal(copy: torch.Tensor, buffer: torch.Tensor) -> bool:
    return copy.shape == buffer.shape and torch.equal(copy, buffer.to("cpu"))


def _bytes_of(micro_batch: Any) -> int:
    return sum(map(num_bytes, tensors(micro_batch)))
