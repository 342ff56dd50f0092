"""The difference between two runs of the same step: relative errors of loss, gradients, buffers and parameters."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Run:
    """What one session computed, on the host."""

    loss: float
    gradients: list[torch.Tensor]
    buffers: list[list[torch.Tensor]]  # per module
    movement: list[torch.Tensor]  # of the parameters in three steps; empty when one was taken
    names: list[Any]


@dataclass(frozen=True)
class Difference:
    """Relative differences between two runs."""

    loss: float
    gradient: float
    cosine: float
    size: float  # of the gradient
    buffers: float
    movement: float


def difference(plain: Run, other: Run) -> Difference:
    """`other` relative to `plain`. Values that are not finite give NaN or infinity."""
    gradient, cosine, size = _relative(plain.gradients, other.gradients)
    return Difference(
        loss=abs(other.loss - plain.loss) / max(abs(plain.loss), sys.float_info.min),
        gradient=gradient,
        cosine=cosine,
        size=size,
        buffers=_buffer_error(plain.buffers, other.buffers),
        movement=_relative(plain.movement, other.movement)[0],
    )


def _buffer_error(plain: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> float:
    """The largest relative error of any module: its floating buffers taken together, and its counters and indices."""
    if len(plain) != len(other):
        return math.inf
    errors = [0.0]
    for ours, theirs in zip(plain, other, strict=True):
        for floating in (True, False):
            kind = [[b.double() for b in side if b.is_floating_point() is floating] for side in (ours, theirs)]
            errors.append(_relative(*kind)[0])
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _relative(plain: list[torch.Tensor], other: list[torch.Tensor]) -> tuple[float, float, float]:
    """|other - plain| / |plain| over all tensors, the cosine between them, and ||other| - |plain|| / |plain|.

    Summed in double precision.
    """
    if [p.shape for p in plain] != [o.shape for o in other]:
        return math.inf, 0.0, math.inf
    pairs = list(zip(plain, other, strict=True))
    distance = math.sqrt(sum(_dot(o - p, o - p) for p, o in pairs))
    norm = math.sqrt(sum(_dot(p, p) for p in plain))
    other_norm = math.sqrt(sum(_dot(o, o) for o in other))
    if norm == 0 or other_norm == 0:
        return (0.0, 1.0, 0.0) if distance == 0 else (math.inf, 0.0, math.inf)
    cosine = sum(_dot(p, o) for p, o in pairs) / (norm * other_norm)
    return distance / norm, cosine, abs(other_norm - norm) / norm


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.dot(a.double().flatten(), b.double().flatten()))


def worst(*differences: Difference) -> Difference:
    """The largest error of each kind. Noise that is not finite is ignored."""

    def largest(values: Iterable[float]) -> float:
        return max((value for value in values if math.isfinite(value)), default=0.0)

    return Difference(
        loss=largest(d.loss for d in differences),
        gradient=largest(d.gradient for d in differences),
        cosine=min(d.cosine for d in differences),
        size=largest(d.size for d in differences),
        buffers=largest(d.buffers for d in differences),
        movement=largest(d.movement for d in differences),
    )
