"""Tensors of a Task built in Python in another process: they lie in one file, which all processes of a search map.

Each process sees the file as the user handed it over: a page that a process writes to becomes a copy of its own. What a process trains, and
its batches, are copied out of the file as well, so that it holds them within its memory limit. All else counts for no process's limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from autotune.lazy import torch

_MAPS = sys.platform != "win32"  # Windows reads a file whole
_STORAGES: dict[int, torch.UntypedStorage] = {}  # by address; they live as long as the process, so that no other has it
_MAPPED: list[int] = []  # bytes of the files in which they lie
_GPUS: set[str] = set()  # that held some of them in the user's process


def load(file: str) -> Any:
    """What a file hands over; its tensors stay in it."""
    num_known = len(_STORAGES)
    place = _note if _MAPS else "cpu"  # what was not mapped is this process's own already
    loaded = torch.load(file, map_location=place, weights_only=False, mmap=_MAPS)
    if len(_STORAGES) > num_known:
        _MAPPED.append(os.path.getsize(file))
    return loaded


def mapped_bytes() -> int:
    """Bytes of this process's mappings of such files. Linux counts them whole as private memory, touched or not."""
    return sum(_MAPPED)


@contextlib.contextmanager
def telling_of_gpus() -> Iterator[None]:
    """Around the user's code: an error of tensors on several devices tells of those that lay on a GPU in the user's process."""
    try:
        yield
    except RuntimeError as error:
        if _GPUS and "same device" in str(error):
            first = next(iter(str(error).splitlines())).rstrip(".")
            error.args = (
                f"{first}; tensors that lie on {' and '.join(sorted(_GPUS))} in the process that built the task are on the CPU here: "
                "move them inside the function that uses them, as by .to(batch.device)",
            )
        raise


def _note(storage: Any, location: str) -> Any:
    """For `torch.load`, as its `map_location`: remember a storage that lies in the file, and leave it there."""
    _STORAGES[storage._cdata] = storage
    if torch.device(location) != storage.device:
        _GPUS.add(location)
    return storage


def own_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model, with parameters and buffers that lie in no file. What shared memory shares it as before."""
    if not any(map(_lies_in_file, (*model.parameters(), *model.buffers()))):
        return model
    copies: dict[int, torch.UntypedStorage] = {}

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if not _lies_in_file(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = storage.clone()
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(copies[storage._cdata], *place)

    model._apply(own)
    return model


def own_batch(batch: Any) -> Any:
    """A batch without tensors that lie in a file."""
    from autotune.task.batches import map_tensors, tensors

    if not any(map(_lies_in_file, tensors(batch))):
        return batch
    return map_tensors(lambda tensor: tensor.clone() if _lies_in_file(tensor) else tensor, batch)


def _lies_in_file(tensor: torch.Tensor) -> bool:
    if not _STORAGES or tensor.layout is not torch.strided:
        return False
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    # in a trace nothing is trained
    return _get_current_dispatch_mode() is None and tensor.untyped_storage()._cdata in _STORAGES
