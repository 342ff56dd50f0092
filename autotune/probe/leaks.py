"""Names what a leak keeps: the tensors that training steps leave behind, and the lines that made them."""

from __future__ import annotations

import functools
import gc
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autotune import session
from autotune.records.outcome import Kept
from autotune.task.usercode import is_user_file

_STEPS = 3  # tensors of the first two that live after the third are leaks
_SHOWN = 10
_LIFT = torch.ops.aten.lift_fresh.default  # the operator with which `torch.tensor` ends
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def kept(step: Callable[[], object]) -> tuple[Kept, ...]:
    """Take a few steps, and find the tensors that each of them leaves behind.

    Every operator is seen as it makes a tensor. Tensors that still live a step later are leaked. Either the code itself holds
    them, by some Python object, or the autograd graph of such a tensor does.

    Args:
        step: takes a training step.

    Returns:
        Up to ten kinds of tensors: first those that the code itself holds; larger ones before smaller.
    """
    births = _Births()
    with births:
        for births.step in range(_STEPS):
            step()
    gc.collect()
    earlier = {number: birth for number, birth in births.known.items() if birth.step < _STEPS - 1}
    living = {number: birth for number, birth in earlier.items() if not birth.storage.expired()}
    held = _held_by_code(living.keys())
    kinds: dict[tuple[str, tuple[int, ...], str, bool, bool], list[_Birth]] = {}
    for number, birth in living.items():
        kind = (birth.place, birth.shape, birth.dtype, number not in held, held.get(number, False))
        kinds.setdefault(kind, []).append(birth)
    found = []
    for (place, shape, dtype, in_graph, has_graph), alike in kinds.items():
        per_step = Counter(birth.step for birth in alike)
        if len(per_step) == _STEPS - 1:
            num_bytes = sum(birth.num_bytes for birth in alike if birth.step == 0)
            found.append(
                Kept(
                    num_tensors=per_step[0],
                    shape=shape,
                    dtype=dtype,
                    place=place,
                    num_bytes=num_bytes,
                    in_graph=in_graph,
                    has_graph=has_graph,
                )
            )
    return tuple(sorted(found, key=lambda one: (one.in_graph, -one.num_bytes))[:_SHOWN])


@dataclass
class _Birth:
    """A storage, which is not kept alive, and where it was made."""

    storage: StorageWeakRef
    step: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    place: str


class _Births(TorchDispatchMode):
    """Takes note of every storage that an operator makes.

    Attributes:
        known: number of a storage -> its birth. The number is not reused while it is known here.
        step: number of the step that runs now.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, _Birth] = {}
        self.step = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        new = [tensor for tensor in _dense(result) if tensor.untyped_storage()._cdata not in self.known]
        if new:
            given = set() if func is _LIFT else {t.untyped_storage()._cdata for t in _dense((args, kwargs or {}))}
            for tensor in new:
                storage = tensor.untyped_storage()
                if storage._cdata not in given:  # else a view of an argument, or the argument changed in place
                    self.known[storage._cdata] = _Birth(
                        storage=StorageWeakRef(storage),
                        step=self.step,
                        shape=tuple(tensor.shape),
                        dtype=str(tensor.dtype).removeprefix("torch."),
                        num_bytes=storage.nbytes(),
                        place=_place(),
                    )
        return result


def _dense(values: Any) -> Iterator[torch.Tensor]:
    """The ordinary tensors among values."""
    for value in torch.utils._pytree.tree_leaves(values):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            yield value


def _held_by_code(numbers: Any) -> dict[int, bool]:
    """Number of a storage with a tensor that some Python object refers to -> whether such a tensor has an autograd graph.

    A tensor that only a graph keeps has a Python object as well, if Python ever saw it, but nothing refers to that object.
    """
    found = tuple(
        value
        for value in gc.get_objects()
        if type(value) is torch.Tensor and value.layout is torch.strided and value.untyped_storage()._cdata in numbers
    )
    known = {id(tensor): (tensor.untyped_storage()._cdata, tensor.grad_fn is not None) for tensor in found}
    gc.unfreeze()  # the process from which probes are forked freezes its objects, the user's module included
    here = sys._getframe()
    referred = (
        value for holder in gc.get_referrers(*found) if holder is not here for value in gc.get_referents(holder)
    )
    held: dict[int, bool] = {}
    for number, has_graph in (known[id(value)] for value in referred if id(value) in known):
        held[number] = held.get(number, False) or has_graph
    return held


def _place() -> str:
    """File and line of the user's code, else of a library's, that called the operator; empty in the backward pass."""
    library = ""
    frame: Any = sys._getframe(2)
    while frame is not None and (name := frame.f_code.co_filename) != session.__file__:
        if is_user := _is_user(name):
            return _line(name, frame.f_lineno)
        if is_user is None and not library:
            library = _line(name, frame.f_lineno)
        frame = frame.f_back
    return library


@functools.cache
def _is_user(name: str) -> bool | None:
    """True for a user's file, None for a library's, False for torch's and others that say nothing of the model."""
    if is_user_file(name):
        return True
    return None if "-packages" in name and not name.startswith(_TORCH) else False


@functools.cache
def _line(name: str, number: int) -> str:
    text = linecache.getline(name, number).strip()[:80]
    return f"{os.path.basename(name)}, line {number}" + (f" (`{text}`)" if text else "")
