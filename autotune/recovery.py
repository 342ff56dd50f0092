"""A step that runs out of memory is taken again in smaller micro batches, as if the first attempt had not been.

That is the same step only where the loss does not couple the samples of a batch. The first step that runs out of memory finds
out: it compares the gradient of a few of its samples with that of their halves.

A probe sees seconds, a run hours: an input longer than any before, or a neighbour on the device, may need memory that was
there when the config was measured.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from autotune.coupling.buffers import Buffers, version_of
from autotune.coupling.compare import find_coupling
from autotune.coupling.samples import SamplesOf, TypicalSamples
from autotune.devices.torch_errors import attempted_bytes
from autotune.errors import in_one_line
from autotune.randomness import RandomState
from autotune.records.check import Cause, Coupling, Verdict
from autotune.task import Task
from autotune.task.adapters import count_on_from, counted_batches
from autotune.task.batches import CannotCutError, StepBatch, num_bytes, split, tensors
from autotune.task.facts import uses_batch_statistics
from autotune.techniques.build import Build
from autotune.units import format_bytes, plural

HALVE: Literal["halve"] = "halve"  # what `prepare` takes as `on_oom`
RAISE: Literal["raise"] = "raise"
COMPARING_S = 5.0  # for finding out whether a batch may be cut, once
_LOG = logging.getLogger("autotune")


class StepPhases(Protocol):
    """The two phases of a step, as `Session` has them."""

    _position: int  # of the micro batch that `accumulate` has come to

    def accumulate(self, batch: Any) -> torch.Tensor:
        """Add the gradient of the mean loss over `batch` to the parameters' gradients."""

    def update(self) -> None:
        """Update the parameters, and clear the gradients."""


class Halving:
    """Cuts batches that are as large as one for which memory was short.

    What ran out of memory is remembered by its bytes: from then on each batch of as many bytes or more is halved until it has
    fewer. So a rare long input costs the others nothing, and a neighbour who stays costs no failed attempt each time. Of two
    with as many bytes (none, where a batch has no tensors) that with more samples is the larger.

    Args:
        what: the batches in words, `micro batch`.
        again: what is done again with a batch that was cut.
    """

    def __init__(self, task: Task, what: str, again: str) -> None:
        self._task = task
        self._what, self._again = what, again
        self._too_large: tuple[float, int] = (math.inf, 0)  # bytes, samples

    def cut(self, batches: StepBatch) -> StepBatch:
        """Batches of which none is known to be too large."""
        if self._too_large[0] == math.inf:
            return batches
        pairs = enumerate(zip(batches, batches.sizes, strict=True))
        parts = [(part, number) for number, (batch, size) in pairs for part in self._fitting(batch, size)]
        if len(parts) == len(batches):
            return batches
        return StepBatch((part for part, _ in parts), [number for _, number in parts])

    def _fitting(self, batch: Any, num_samples: int) -> Iterator[tuple[Any, int]]:
        parts = StepBatch([(batch, num_samples)])
        if num_samples > 1 and (_bytes_of(batch), num_samples) >= self._too_large:
            with suppress(CannotCutError):
                parts = self._halves(batch, num_samples)
        for part, size in zip(parts, parts.sizes, strict=True):
            if len(parts) == 1:
                yield part, size
            else:
                yield from self._fitting(part, size)

    def _halves(self, batch: Any, num_samples: int) -> StepBatch:
        return split(batch, self._task.cuts(), -(-num_samples // 2))

    def why_not(self, batch: Any, num_samples: int) -> str:
        """Why a batch that ran out of memory cannot be cut; empty where it can."""
        try:
            halves = self._halves(batch, num_samples)
        except CannotCutError as cannot:
            return f"only the task itself can make smaller batches, since one holds {cannot}"
        return "one sample alone does not fit" if len(halves) == 1 else ""

    def learn(self, batch: Any, num_samples: int, error: Exception) -> None:
        """Cut batches as large as this one, which ran out of memory and can be cut, from now on, and say so."""
        held_bytes, attempted = _bytes_of(batch), attempted_bytes(error)
        self._too_large = held_bytes, num_samples
        _LOG.warning(
            "out of memory in a %s of %s%s: %s in %ses of %d, and from now on every %s of as much data%s or more is cut so; "
            "smaller ones stay whole",
            self._what,
            plural(num_samples, "sample"),
            f" (an allocation of {format_bytes(attempted)} failed)" if attempted else "",
            self._again,
            self._what,
            -(-num_samples // 2),
            self._what,
            f" ({format_bytes(held_bytes)})" if held_bytes else "",
        )


class Recovery:
    """Takes the steps of one session.

    Before a step it takes note of what the step will change: the random state, and the buffers that forward passes were
    seen to change. Nothing is copied from a GPU for that, and nothing waits for it. Only the first step copies all buffers
    to the host, to see which of them change. A failure to take note never fails the step.
    """

    def __init__(self, build: Build) -> None:
        self._device = build.device
        self._task = build.task
        self._halving = Halving(build.task, "micro batch", "the same optimizer step is taken again")
        self._may_cut = False  # known from the first step on that ran out of memory
        self._model = build.model
        self._parameters = tuple(build.model.parameters())
        self._buffers = Buffers(build.model)
        self._has_warned = False  # of a gradient that is not cleared
        self._never = build.unrepeatable or build.one_micro_batch
        if build.task.takes_whole_steps:
            self._never = "the task's own step is one unit, which may have updated parameters already"
        elif uses_batch_statistics(build.model):
            self._never = BATCH_STATISTICS

    def step(self, session: StepPhases, micro_batches: StepBatch) -> torch.Tensor:
        """Take one optimizer step, in smaller micro batches where these do not fit; returns the loss, as `Session.step` does.

        Raises:
            Exception: what the step raises. Out of memory that cannot be recovered from has a note that says why not.
        """
        while True:
            cut = self._halving.cut(micro_batches)
            start = self._note(cut)
            try:
                loss = session.accumulate(cut)
                break
            except Exception as error:
                if not self._device.is_out_of_memory(error):
                    raise
                reason = self._never
                micro, size = cut[session._position], cut.sizes[session._position]
                if start is not None:
                    reason = self._why_not(start) or self._halving.why_not(micro, size)
                if start is None or reason:
                    error.add_note(f"{_CANNOT}: {reason}")
                    raise
                failed = error
                traceback.clear_frames(error.__traceback__)  # which hold what the attempt took
            self._undo(start)
            if reason := self._coupled(micro, size, start):
                failed.add_note(f"{_CANNOT}: {reason}")
                raise failed
            self._halving.learn(micro, size, failed)
            del failed
        if start is not None:
            with self._never_failing():
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

    def _coupled(self, micro_batch: Any, num_samples: int, start: _Start) -> str:
        """Why smaller micro batches would learn something else, or may; empty where they would not. Looked into once."""
        if self._may_cut:
            return ""
        found = Coupling(verdict=Verdict.UNKNOWN)
        try:
            for samples in (SamplesOf(self._task, micro_batch), TypicalSamples(self._task)):
                if found.verdict is Verdict.UNKNOWN:  # two samples as long as these may not fit
                    most = max(2, num_samples // 4)  # the step itself needs room for twice as many
                    found = find_coupling(
                        self._task, self._model, self._device, samples, most=most, seconds=COMPARING_S
                    )
        except Exception as error:
            found = Coupling.unknown(f"comparing micro batches raised {in_one_line(error)}")
        finally:
            self._undo(start)
        self._may_cut = found.may_be_cut or found.cause is Cause.PADDING  # the parts of a batch have its padding
        return "" if self._may_cut else f"{found.reason}; choose a config that needs less memory"

    def _note(self, batch: StepBatch) -> _Start | None:
        """What the step can be undone by; None where it cannot be."""
        if self._never:
            return None
        start = None
        with self._never_failing():
            self._buffers.note()
            start = _Start(
                with_gradient=next((p for p in self._parameters if p.grad is not None), None),
                inputs=[(tensor, version_of(tensor)) for tensor in tensors(batch)],
                random=RandomState(self._device.torch_device),
                num_batches=counted_batches(self._model),
            )
            if start.with_gradient is not None and not self._has_warned:
                self._has_warned = True
                _LOG.warning(
                    "should memory run out in a step like this, autotune cannot take it again: %s", self._why_not(start)
                )
        return start

    @contextmanager
    def _never_failing(self) -> Iterator[None]:
        """Around taking note: where that fails, this step and all later ones go on without it."""
        try:
            yield
        except Exception as error:
            self._never = f"what steps change could not be noted ({type(error).__name__}: {error})"
            _LOG.warning("should memory run out, autotune cannot take the step again: %s", self._never)

    def _why_not(self, start: _Start) -> str:
        """Why what the attempt changed cannot be restored; empty where it can."""
        if start.with_gradient is not None:
            name = next((n for n, p in self._model.named_parameters() if p is start.with_gradient), "a parameter")
            return (
                f"{name} had a gradient before the step, to which this one was added; clear gradients between steps, and "
                "let no parameter require a gradient that the optimizer does not update"
            )
        if uses_batch_statistics(self._model):
            return BATCH_STATISTICS
        if any(parameter._post_accumulate_grad_hooks for parameter in self._model.parameters()):
            return "a hook of a parameter may have used its gradient during the backward pass"
        if any(version_of(tensor) != version for tensor, version in start.inputs):
            return "the training code changed its batch in place"
        if lost := self._buffers.lost():
            return f"the buffer {lost} changed, and its value from before was not kept"
        return ""

    def _undo(self, start: _Start) -> None:
        """Put everything back as it was."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._buffers.restore()
        start.random.restore()
        count_on_from(self._model, start.num_batches)
        self._device.give_back()


_CANNOT = "autotune cannot take the step again in smaller micro batches"
BATCH_STATISTICS = (
    "batch normalisation would see smaller micro batches, and the step would learn something else; choose a smaller "
    "batch_size"
)


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a step that begins now can be judged and undone by.

    Attributes:
        with_gradient: a parameter that has a gradient already.
        inputs: the tensors of the batch, with their versions.
        num_batches: that a LightningModule has counted.
    """

    with_gradient: torch.nn.Parameter | None
    inputs: Sequence[tuple[torch.Tensor, int | None]]
    random: RandomState
    num_batches: int


def _bytes_of(micro_batch: Any) -> int:
    return sum(map(num_bytes, tensors(micro_batch)))
