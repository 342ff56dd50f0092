"""Batches of any structure: what is in them, how they move to a device, and how they are cut into micro batches.

Two batches of different sizes are compared. The samples of a tensor lie along the one dimension whose length is the number of
samples in both; those of a list are its items, if it has as many. A tensor that differs in shape and has no such dimension (rows
packed into one, the edges of graphs), or has several, cannot be cut: only the code that makes batches can make smaller ones.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Cuts = int | Mapping[Any, Any] | None  # the dimension of the samples, or each part's; None: whole in every micro batch


class StepBatch(list[Any]):
    """The micro batches of one optimizer step, in order. `Session.loader` yields it and `Session.step` takes it.

    Attributes:
        sizes: samples of each micro batch.
        numbers: where micro batches that did not fit were cut, the number of the one in the step that each is a part of; else empty.
    """

    def __init__(self, micro_batches: Iterable[tuple[Any, int]] = (), numbers: Sequence[int] = ()) -> None:
        pairs = list(micro_batches)
        super().__init__(micro for micro, _ in pairs)
        self.sizes = [size for _, size in pairs]
        self.numbers = numbers


class CannotCutError(Exception):
    """A batch cannot be cut into micro batches; the message says what it holds."""


def map_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """The same structure with every tensor replaced by `function(tensor)`; other values stay as they are.

    Mappings, lists, tuples and dataclasses are structure, whatever their class. Objects of other classes stay.
    """
    return _map(batch, lambda part: isinstance(part, torch.Tensor), function)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on a device. As with trainers, whatever has a method `to(device)` is moved by it; other values stay."""

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=True)
        part = copy.copy(part)  # many move in place
        moved = part.to(device)
        return part if moved is None else moved

    return _map(batch, _moves, move)


def fresh_copy(batch: Any) -> Any:
    """A copy for code that changes its input in place; what cannot be copied (a lock, a graph's tensor) stays."""

    def copied(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.clone()
        with contextlib.suppress(Exception):
            return copy.deepcopy(part)
        return part

    return _map(batch, lambda part: not _parts(part), copied)


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a batch, in a fixed order, also those that other objects hold as attributes."""
    if isinstance(batch, torch.Tensor):
        yield batch
    else:
        for part in contents(batch).values():
            yield from tensors(part)


def shapes(batch: Any) -> Iterator[tuple[Any, ...]]:
    """The shape of each value of a batch, in a fixed order; empty of what has none.

    That of a nested tensor is one entry, its number of rows and the shape of all their elements: nothing pads it.
    """
    is_tensor = isinstance(batch, torch.Tensor)
    is_list = isinstance(batch, list | tuple)  # it may be long, and not all of it asked for
    parts: Collection[Any] = () if is_tensor else batch if is_list else contents(batch).values()
    for part in parts:
        yield from shapes(part)
    if is_tensor and batch.is_nested:
        yield ((batch.size(0), *batch.values().shape),)
    elif not parts:
        yield tuple(batch.shape) if is_tensor or isinstance(batch, np.ndarray) else ()


def contents(batch: Any) -> Mapping[Any, Any]:
    """The parts of a structure, or the attributes of an object that can be moved to a device; empty for all else."""
    return _parts(batch) or (vars(batch) if _moves(batch) and hasattr(batch, "__dict__") else {})


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, or of the parts of a sparse one; of a jagged one without its offsets."""
    return tensor.nbytes if tensor.is_nested else sum(part.nbytes for part in strided_parts(tensor))


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that hold the memory of a sparse or jagged tensor; of any other, itself."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]  # a DTensor has its mesh among them
        return [dense for part in parts if isinstance(part, torch.Tensor) for dense in strided_parts(part)]
    if tensor.layout is torch.strided:
        return [tensor]
    return [getattr(tensor, part)() for part in _PARTS.get(tensor.layout, ())]


def own_elements(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The index of those elements of a strided tensor that have memory of their own: one stands for all of an expanded dimension.

    Into them alone torch writes.
    """
    return tuple(slice(None) if stride else slice(1) for stride in tensor.stride())


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def find_cuts(small: Any, large: Any, sizes: tuple[int, int]) -> Cuts:
    """Where the samples of a task's batches are, from two batches of different `sizes`.

    Returns:
        None if nothing in them depends on the size.

    Raises:
        CannotCutError: something depends on the size, or may, and does not have its length in one dimension alone.
    """
    if isinstance(small, torch.Tensor) and isinstance(large, torch.Tensor):
        if small.is_nested:
            return 0
        found = [dim for dim in range(min(small.dim(), large.dim())) if (small.size(dim), large.size(dim)) == sizes]
        if len(found) > 1:
            raise CannotCutError(f"a tensor of shape {tuple(large.shape)} for {sizes[1]} samples")
        if not found and small.shape != large.shape:
            shapes = f"{tuple(small.shape)} and {tuple(large.shape)}"
            raise CannotCutError(f"tensors of shapes {shapes} for {sizes[0]} and {sizes[1]} samples")
        if not found and _is_number(small) and small.item() != large.item():
            raise CannotCutError(f"a number that differs between batches ({small.item()} and {large.item()})")
        return found[0] if found else None
    if _is_sliced(small) and _is_sliced(large) and (len(small), len(large)) == sizes:
        return 0
    parts, others = _parts(small), _parts(large)
    if parts.keys() != others.keys():
        raise CannotCutError(f"a {type(small).__name__} with another number of items than samples")
    if not parts and small is not large and (_moves(small) or hasattr(small, "__dict__")):
        raise CannotCutError(f"an object of the class {type(small).__name__}")
    if isinstance(small, np.ndarray) and isinstance(large, np.ndarray) and small.shape != large.shape:
        shapes = f"{small.shape} and {large.shape}"
        raise CannotCutError(f"arrays of shapes {shapes} for {sizes[0]} and {sizes[1]} samples")
    if _is_number(small) and _is_number(large) and small != large:
        raise CannotCutError(f"a number that differs between batches ({small} and {large})")
    inside = {key: find_cuts(part, others[key], sizes) for key, part in parts.items()}
    return inside if any(cut is not None for cut in inside.values()) else None


def split(batch: Any, cuts: Cuts, batch_size: int) -> StepBatch:
    """Cut a batch into micro batches of `batch_size` samples; the last may be smaller.

    Raises:
        CannotCutError: its structure is not that of the batches in which the cuts were found.
    """
    lengths = set(_lengths(batch, cuts))
    if len(lengths) != 1:
        raise CannotCutError(f"parts of {' and '.join(map(str, sorted(lengths))) or 'no'} samples")
    samples = lengths.pop()
    if samples <= batch_size:
        return StepBatch([(batch, samples)])
    starts = range(0, samples, batch_size)
    return StepBatch(
        (_slice(batch, cuts, start, min(start + batch_size, samples)), min(batch_size, samples - start))
        for start in starts
    )


def _map(batch: Any, is_leaf: Callable[[Any], bool], function: Callable[[Any], Any]) -> Any:
    if is_leaf(batch):
        return function(batch)
    parts = _parts(batch)
    return _with_parts(batch, {key: _map(part, is_leaf, function) for key, part in parts.items()}) if parts else batch


def _parts(batch: Any) -> Mapping[Any, Any]:
    """What a structure holds, by key, position or field; empty for what is no structure."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {}


def _with_parts(batch: Any, parts: Mapping[Any, Any]) -> Any:
    """A structure of the same kind with other parts. Tuples, and mappings that are no dict, are built anew from the parts alone."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict | UserDict):
        try:  # not by writing into a shallow copy, which may change the original too
            return type(batch)(parts)  # type: ignore[call-arg]
        except Exception:
            return dict(parts)
    if isinstance(batch, tuple):
        return type(batch)(*parts.values()) if hasattr(batch, "_fields") else type(batch)(parts.values())
    copied = copy.copy(batch)
    for key, part in parts.items():
        if isinstance(batch, Mapping | list):
            copied[key] = part
        else:
            object.__setattr__(copied, key, part)  # a frozen dataclass, too
    return copied


def _moves(part: Any) -> bool:
    return not isinstance(part, type) and callable(getattr(part, "to", None))


def _is_number(part: Any) -> bool:
    if isinstance(part, torch.Tensor):
        return part.layout is torch.strided and part.numel() == 1
    return (isinstance(part, np.ndarray) and part.size == 1) or isinstance(part, Number)


def _is_sliced(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        return part.ndim > 0
    return hasattr(part, "__len__") and hasattr(part, "__getitem__") and not isinstance(part, str | bytes | Mapping)


def _lengths(batch: Any, cuts: Cuts) -> Iterator[int]:
    if isinstance(cuts, Mapping):
        parts = _parts(batch)
        if missing := cuts.keys() - parts.keys():
            raise CannotCutError(f"a {type(batch).__name__} without {min(missing, key=str)!r}")
        for key, cut in cuts.items():
            yield from _lengths(parts[key], cut)
    elif isinstance(batch, torch.Tensor) and cuts is not None:
        if batch.dim() <= cuts:
            raise CannotCutError(f"a tensor of {batch.dim()} dimensions")
        yield batch.size(cuts)
    elif cuts is not None:
        if not _is_sliced(batch):
            raise CannotCutError(f"a {type(batch).__name__}")
        yield len(batch)


def _slice(batch: Any, cuts: Cuts, start: int, stop: int) -> Any:
    if cuts is None:
        return batch
    if isinstance(cuts, Mapping):
        return _with_parts(batch, {k: _slice(part, cuts.get(k), start, stop) for k, part in _parts(batch).items()})
    if not isinstance(batch, torch.Tensor):
        return batch[start:stop]
    if batch.is_nested:
        return torch.nested.as_nested_tensor(list(batch.unbind()[start:stop]), layout=batch.layout)
    if batch.layout is not torch.strided:
        return batch.index_select(cuts, torch.arange(start, stop, device=batch.device))
    return batch.narrow(cuts, start, stop - start)
