"""Imported before torch, makes it one that was built without `torch.distributed` (`USE_DISTRIBUTED=0`), as far as Python sees it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

LACKS = ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init")  # by which torch knows its parts
SHARDS = "torch.distributed.tensor"


class Finder:
    """Finds torch's library, which then lacks some names."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch._C" or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_without(module: ModuleType) -> None:
            execute(module)
            for lacking in LACKS:
                vars(module).pop(lacking, None)

        spec.loader.exec_module = execute_without  # type: ignore[method-assign]
        return spec


def _let_library_look_for_shards() -> None:
    """The library itself was built with groups, and looks once for the class of shards: let it find one that nobody else does."""
    from torch import zeros
    from torch._subclasses.fake_tensor import FakeTensorMode

    sys.modules[SHARDS] = ModuleType(SHARDS)
    sys.modules[SHARDS].DTensor = type("DTensor", (), {})  # type: ignore[attr-defined]
    with FakeTensorMode():
        fake = zeros(1)
    fake.clone()  # outside of the mode by what kind of tensor it is
    del sys.modules[SHARDS]


assert "torch" not in sys.modules
sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
_let_library_look_for_shards()
