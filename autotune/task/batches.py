"""Batches of any structure: a tensor, or tuples, lists, dicts and dataclasses of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


class StepBatch(list[Any]):
    """The micro batches of one optimizer step, in order. `Session.loader` yields it and `Session.step` takes it."""


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """The same structure with every tensor replaced by `function(tensor)`; other values stay as they are."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(function, value) for key, value in batch.items()}
        return items if type(batch) is dict else type(batch)(items)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changes = {f.name: map_tensors(function, getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **changes)
    return batch


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, in a fixed order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, batch)
    return iter(found)


def num_samples(batch: Any) -> int:
    """Samples in a micro batch: the first dimension of its first tensor that has a dimension.

    Raises:
        ValueError: the batch holds no tensor with a dimension.
    """
    for tensor in tensors(batch):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise ValueError(f"a batch of type {type(batch).__name__} holds no tensor with a batch dimension")


def split(batch: Any, batch_size: int) -> StepBatch:
    """Cut a batch into micro batches of `batch_size` samples along the first dimension; the last may be smaller.

    Scalars, and tensors whose first dimension is not the number of samples, go whole to every micro batch.
    """
    samples = num_samples(batch)
    if samples <= batch_size:
        return StepBatch([batch])

    def cut(start: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.dim() == 0 or tensor.shape[0] != samples
            return tensor if whole else tensor[start : start + batch_size]

        return take

    return StepBatch(map_tensors(cut(start), batch) for start in range(0, samples, batch_size))
