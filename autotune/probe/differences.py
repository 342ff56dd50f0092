"""What a session has computed, and by how much two of them differ."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import torch

Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Values:
    """What one session computed, on the host."""

    loss: float
    gradients: Tensors
    buffers: list[Tensors]  # per module
    movement: Tensors  # how the parameters moved in all steps; empty when only one was taken
    names: list[Any]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Relative differences between two runs."""

    loss: float
    gradient: float
    cosine: float
    size: float  # of the gradient's norm
    buffers: float
    movement: float


def difference(plain: Values, other: Values) -> Difference:
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


def worst(*differences: Difference) -> Difference:
    """The largest error of each kind, and the smallest cosine. Noise that is not finite is ignored."""

    def largest(name: str) -> float:
        return max(filter(math.isfinite, (getattr(one, name) for one in differences)), default=0.0)

    names = [field.name for field in dataclasses.fields(Difference) if field.name != "cosine"]
    return Difference(cosine=min(one.cosine for one in differences), **{name: largest(name) for name in names})


def _buffer_error(plain: list[Tensors], other: list[Tensors]) -> float:
    """The largest relative error of any module: its floating buffers taken together, and its counters and indices."""
    if len(plain) != len(other):
        return math.inf
    errors = [0.0]
    for ours, theirs in zip(plain, other, strict=True):
        for floating in (True, False):
            kind = [[b.double() for b in side if b.is_floating_point() is floating] for side in (ours, theirs)]
            errors.append(_relative(*kind)[0])
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _relative(plain: Tensors, other: Tensors) -> tuple[float, float, float]:
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
