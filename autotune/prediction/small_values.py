"""True values of small tensors beside fake ones, while a model is built: its constructor may read drop-path rates, sizes, switches."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

MOST_ELEMENTS = 4096  # of a tensor whose values are kept

_READ = torch.ops.aten._local_scalar_dense.default


class SmallValues(TorchDispatchMode):
    """Computes for real, too, what follows from small tensors alone. Entered inside a `FakeTensorMode`.

    What is small and depends on a tensor whose values are not known has none either.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakTensorKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of `StorageTracker`

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        known = all(tensor in self._values for tensor in given)
        if func is _READ and known:
            return self._really(func, args, kwargs)
        result = func(*args, **kwargs)
        if not known:
            self._forget(func, args, kwargs)
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        if made and all(tensor.numel() <= MOST_ELEMENTS for tensor in made):
            real = [leaf for leaf in tree_leaves(self._really(func, args, kwargs)) if isinstance(leaf, torch.Tensor)]
            for fake, value in zip(made, real, strict=True):
                self._values[fake] = value
        return result

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator does with the values."""
        args, kwargs = tree_map_only(FakeTensor, self._values.__getitem__, (args, kwargs))
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop the values of what an operator writes to, and of what shares its memory."""
        for place, said in enumerate(func._schema.arguments):
            if said.alias_info is None or not said.alias_info.is_write:
                continue
            tensor = args[place] if place < len(args) else kwargs.get(said.name)
            if isinstance(tensor, FakeTensor) and (value := self._values.get(tensor)) is not None:
                storage = value.untyped_storage()._cdata
                for other in [t for t, v in self._values.items() if v.untyped_storage()._cdata == storage]:
                    del self._values[other]
