"""Whether the losses and gradients of a run are finite."""

from __future__ import annotations

import math

import torch

from autotune.group import gather
from autotune.session import Session


class NonFiniteError(Exception):
    """The loss or a gradient is NaN or infinite."""


class Losses:
    """The losses of a run so far. To note one does not wait for the device.

    Attributes:
        last: the latest one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._finite = torch.ones((), dtype=torch.bool, device=session.device)
        self._own_finite = self._finite.clone()  # this process's part, when the loss of all was first not finite
        self.last = torch.zeros((), device=session.device)

    def note(self, loss: torch.Tensor) -> None:
        """Take note of the loss of what was trained on."""
        self.last = loss
        if self._session.own_loss is not None:
            self._own_finite &= torch.isfinite(self._session.own_loss) | ~self._finite
        self._finite &= torch.isfinite(loss)

    @property
    def are_finite(self) -> bool:
        """Whether all of them are."""
        return bool(self._finite)

    def require_finite(self, num_steps: int) -> None:
        """Refuse a loss that was not, by this optimizer step. Raises NonFiniteError."""
        if self.are_finite:
            return
        of_ranks = ""
        if self._session.own_loss is not None:
            own = enumerate(gather(bool(self._own_finite)))
            of_ranks = ",".join(f" of rank {rank}" for rank, is_finite in own if not is_finite)
        raise NonFiniteError(f"the loss{of_ranks} was {float(self.last)} by optimizer step {num_steps}")


def require_finite_gradients(model: torch.nn.Module, num_steps: int) -> None:
    """Refuse a gradient that is not finite at this optimizer step. Raises NonFiniteError."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_finite(dense_values(parameter.grad)):
            raise NonFiniteError(f"the gradient of {name} was not finite at optimizer step {num_steps}")


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite. `isfinite` makes copies as large as its input, which could set the peak; a norm makes none."""
    return not values.numel() or bool(torch.isfinite(torch.linalg.vector_norm(values, math.inf)))


def dense_values(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient's entries as a dense tensor; of a sparse gradient the stored entries, without merging duplicates or copying."""
    return gradient._values() if gradient.is_sparse else gradient
