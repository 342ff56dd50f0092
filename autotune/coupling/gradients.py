"""Takes the gradient of a batch and that of its micro batches, from equal states and with equal random numbers."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autotune.coupling.buffers import State, hold_still
from autotune.coupling.draws import SameDraws, dropout_off
from autotune.coupling.samples import Halves
from autotune.devices import Device
from autotune.randomness import RandomState, seed_everything
from autotune.task import Task
from autotune.task.adapters import uncounted
from autotune.task.batches import fresh_copy, to_device
from autotune.task.losses import shares_of
from autotune.units import format_seconds

LOSS_ERROR = 1e-4  # relative, of a loss: what is below is rounding
FIT_ERROR = 1e-5  # relative, of the gradient put together from its parts with other weights
ALIKE = 0.5  # two runs whose differences have at least this cosine have one cause
MOVED = 2.0**-8  # relative: as far as the shortest type rounds
NUM_ELEMENTS = 2**14  # so many elements of each parameter's gradient are compared, drawn where there are more


class OutOfTimeError(Exception):
    """A comparison has taken too long."""


@dataclass(frozen=True)
class Gradient:
    """The loss of a batch and its gradient.

    Attributes:
        values: a sample of the gradient, in double precision on the host; empty where only the loss was asked for.
    """

    loss: float
    values: torch.Tensor

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all of the gradient are."""
        return math.isfinite(self.loss) and bool(self.values.isfinite().all())


@dataclass(frozen=True)
class Compared:
    """The gradients of a batch and of its parts, each with its share in the mean."""

    whole: Gradient
    parts: tuple[Gradient, ...]
    shares: tuple[float, ...]
    draws: SameDraws

    @property
    def difference(self) -> torch.Tensor:
        """The gradient of the whole less the mean of those of its parts."""
        parts = (share * part.values for share, part in zip(self.shares, self.parts, strict=True))
        return self.whole.values - sum(parts, torch.zeros_like(self.whole.values))

    @property
    def scale(self) -> float:
        """The size of the gradients: not small where those of the parts are large and cancel each other."""
        parts = sum(float(share * part.values.norm()) for share, part in zip(self.shares, self.parts, strict=True))
        return max(float(self.whole.values.norm()), parts)

    @property
    def error(self) -> float:
        """The relative difference of the gradients."""
        return float(self.difference.norm()) / self.scale

    @property
    def loss_difference(self) -> float:
        """The loss of the whole less the mean of those of its parts."""
        return self.whole.loss - sum(share * part.loss for share, part in zip(self.shares, self.parts, strict=True))

    def weights(self) -> tuple[float, ...] | None:
        """The weights with which the parts' gradients add up to that of the whole; None where no weights do."""
        parts = torch.stack([part.values for part in self.parts], dim=1)
        found = torch.linalg.lstsq(parts, self.whole.values[:, None]).solution
        misses = float((parts @ found - self.whole.values[:, None]).norm())
        weights = tuple(found.flatten().tolist())
        return weights if misses <= FIT_ERROR * self.scale and min(weights) >= 0 else None

    def has_the_cause_of(self, others: Sequence[Compared]) -> bool:
        """Whether the differences of several runs have one cause: those of the gradients, or else those of the losses."""
        if sum(self._cosine(other) for other in others) / len(others) >= ALIKE:
            return True
        losses = [compared._clear_loss_difference() for compared in (self, *others)]
        least, most = min(map(abs, losses)), max(map(abs, losses))
        return len({math.copysign(1.0, loss) for loss in losses}) == 1 and 0 < ALIKE * most <= least

    def _cosine(self, other: Compared) -> float:
        a, b = self.difference, other.difference
        norms = float(a.norm() * b.norm())
        return float(a @ b) / norms if norms > 0 and math.isfinite(norms) else 0.0

    def _clear_loss_difference(self) -> float:
        """The difference of the losses; 0 where it may be rounding."""
        parts = sum(abs(share * part.loss) for share, part in zip(self.shares, self.parts, strict=True))
        found = self.loss_difference
        return found if abs(found) > LOSS_ERROR * max(abs(self.whole.loss), parts) else 0.0


class Gradients:
    """Takes the gradients of batches and of their parts, with one model.

    Args:
        longest_s: seconds from now on after which no gradient is begun.

    Attributes:
        random: the random state with which each pass begins.
        sample_s: seconds that each sample of the latest micro batches took.
    """

    def __init__(self, task: Task, model: torch.nn.Module, device: Device, longest_s: float) -> None:
        self._task, self._model, self._device = task, model, device.torch_device
        self._longest_s, self._latest_s = longest_s, time.monotonic() + longest_s
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.random = RandomState(self._device)
        self._state = State(model)  # with the values with which each comparison begins
        self.sample_s = 0.0

    @contextlib.contextmanager
    def equal_conditions(self, whole: Any) -> Iterator[None]:
        """Around the passes that are compared: no dropout, and nothing that depends on how many samples are normalised together."""
        outside = State(self._model)
        outside.note()
        try:
            with contextlib.ExitStack() as stack:
                if "torch._dynamo" in sys.modules:  # compiled code would be compiled again for each size
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(dropout_off(self._model))
                stack.enter_context(hold_still(self._model, lambda: self._loss(whole)))
                self._state = State(self._model)
                self._state.note()
                yield
        finally:
            outside.restore()

    def changed(self) -> str:
        """What a pass changed of the model's state; empty where it changed nothing."""
        return self._state.changed()

    def compare(self, halves: Halves) -> Compared:
        """The gradients of a batch and, from the same state on, of its parts, as `Session.accumulate` takes and weights them."""
        draws, parts = SameDraws(blocked=halves.blocked), halves.parts
        self._state.restore()
        with draws.whole():
            whole = self._gradient(halves.whole)
        self._state.restore()
        began_s = time.perf_counter()
        found, start = [], 0
        shares = shares_of(list(map(self._task.weight, parts, parts.sizes)))
        for part, size, share in zip(parts, parts.sizes, shares, strict=True):
            if halves.restores_between:
                self._state.restore()
            if share:
                with draws.part(start, start + size, halves.num_samples):
                    found.append(self._gradient(part))
            start += size
        self.sample_s = (time.perf_counter() - began_s) / halves.num_samples
        return Compared(whole, tuple(found), tuple(share for share in shares if share), draws)

    def clear(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def other_parameters(self, seed: int) -> Iterator[None]:
        """All parameters moved a little at random, and put back at the end."""
        generator = torch.Generator().manual_seed(seed)
        floating = [p for p in self._model.parameters() if p.is_floating_point()]
        before = [parameter.detach().to("cpu", copy=True) for parameter in floating]
        try:
            with torch.no_grad():
                for parameter in floating:
                    signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
                    parameter.mul_(1 + signs * MOVED)
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(floating, before, strict=True):
                    parameter.copy_(value)

    @contextlib.contextmanager
    def other_draws(self, seed: int) -> Iterator[None]:
        """Each pass draws other random numbers."""
        before = self.random
        seed_everything(seed)
        self.random = RandomState(self._device)
        try:
            yield
        finally:
            self.random = before

    def _loss(self, batch: Any) -> torch.Tensor:
        self.random.restore()
        with uncounted(self._model):
            return self._task.loss(self._model, to_device(fresh_copy(batch), self._device))

    def _gradient(self, batch: Any) -> Gradient:
        if time.monotonic() > self._latest_s:
            raise OutOfTimeError(
                f"comparing a batch with its halves took more than {format_seconds(self._longest_s)}; a larger --budget "
                "gives it more"
            )
        loss = self._loss(batch)
        if not torch.is_grad_enabled():
            return Gradient(loss.item(), torch.zeros(0, dtype=torch.float64))
        loss.backward()
        values = [_sample(parameter, number) for number, parameter in enumerate(self._parameters)]
        self.clear()
        return Gradient(loss.detach().item(), torch.cat(values))


def _sample(parameter: torch.nn.Parameter, number: int) -> torch.Tensor:
    """Elements of a parameter's gradient, always the same ones, in double precision on the host."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(min(parameter.numel(), NUM_ELEMENTS), dtype=torch.float64)
    gradient = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
    if gradient.numel() > NUM_ELEMENTS:
        generator = torch.Generator().manual_seed(number)
        gradient = gradient[torch.randint(gradient.numel(), (NUM_ELEMENTS,), generator=generator).to(gradient.device)]
    return gradient.to("cpu", torch.float64)
