"""Convolutions without TF32, while a config's gradients are compared with plain fp32's.

cuDNN rounds the inputs of fp32 convolutions to TF32 by default, in the user's training and in every probe. Compared like that,
an exact technique that makes cuDNN choose another algorithm would differ by as much as TF32 rounds, which is no fault of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Switch TF32 off in cuDNN, and put it back."""
    cudnn = torch.backends.cudnn
    try:
        before = cudnn.allow_tf32
    except (
        RuntimeError
    ):  # the model file has set one kind of operator's `fp32_precision` (torch 2.9), which this cannot tell
        operators = cudnn.conv, cudnn.rnn  # type: ignore[attr-defined]
        precisions = [operator.fp32_precision for operator in operators]
        cudnn.allow_tf32 = False
        try:
            yield
        finally:
            for operator, precision in zip(operators, precisions, strict=True):
                operator.fp32_precision = precision
        return
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32 = before
