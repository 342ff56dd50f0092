"""Finds the modules that may compute in place, because no operator of a training pass reads their input after them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

from autotune.task.batches import strided_parts

_READ_DEVICE = torch.ops.prim.device.default  # fake tensors dispatch it, and real ones do not


def find_overwritable(modules: Sequence[torch.nn.Module], train: Callable[[], None]) -> list[torch.nn.Module]:
    """Those of `modules`, functions of one tensor, that may overwrite that tensor, as seen in training passes.

    A module may if three things hold in each of its calls: no operator reads or writes the storage of its input afterwards, in
    the forward or the backward pass; none writes the storage of its output, which its own backward pass needs; and the input is
    gone when the passes are over, unlike a parameter, a batch or a constant. The values of the tensors do not matter.

    Args:
        train: runs one or several forward and backward passes, and keeps nothing of them.
    """
    watch = _Watch()
    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(watch.before).remove)
            hooks.callback(module.register_forward_hook(watch.after).remove)
        with watch:
            train()
    if watch.held():
        gc.collect()  # tensors that only a reference cycle keeps alive are not held
    called = {module for _, module in watch.inputs.values()}
    return [module for module in modules if module in called - watch.refused - watch.held()]


class _Watch(TorchDispatchMode):
    """Sees every operator, and refuses a module whose input is used after it, or whose output is written.

    A module is given a copy of its input, so that what it keeps for its own backward pass does not count as another use.

    Attributes:
        inputs, outputs: the modules' inputs and outputs, by the address of the storage object. The weak reference keeps that
            address from being reused.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs: dict[int, tuple[StorageWeakRef, torch.nn.Module]] = {}
        self.outputs: dict[int, tuple[StorageWeakRef, torch.nn.Module]] = {}
        self.refused: set[torch.nn.Module] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not _READ_DEVICE:
            for value in arg_tree_leaves(*args, **kwargs):
                self._refuse(self.inputs, value)
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._refuse(self.outputs, value)
        return func(*args, **kwargs)

    def _refuse(self, known: dict[int, tuple[StorageWeakRef, torch.nn.Module]], value: Any) -> None:
        for part in strided_parts(value) if isinstance(value, torch.Tensor) else ():
            if found := known.get(part.untyped_storage()._cdata):
                self.refused.add(found[1])

    def held(self) -> set[torch.nn.Module]:
        """The modules whose input still exists."""
        return {module for storage, module in self.inputs.values() if not storage.expired()}

    def before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
        """A hook before each call of a module."""
        if not args or args[0].layout is not torch.strided:
            self.refused.add(module)
            return None
        storage = args[0].untyped_storage()
        if storage._cdata in self.inputs or storage._cdata in self.outputs:
            self.refused.add(module)
        copy = args[0].clone()  # counts as a use, which refuses another module with the same input
        self.inputs[storage._cdata] = StorageWeakRef(storage), module
        return copy

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """A hook after each call of a module."""
        storage = output.untyped_storage()
        self.outputs[storage._cdata] = StorageWeakRef(storage), module
