"""torch, imported when it is first used: whoever searches needs none, and importing it takes seconds."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Lazy:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            if "_module" not in vars(self):
                self._module = importlib.import_module(self._name)
            return getattr(self._module, attribute)

    torch = _Lazy("torch")


def torch_if_imported() -> Any | None:
    """torch's module where this process has imported it, None where it has not. Waits for another thread that imports it now."""
    return importlib.import_module("torch") if "torch" in sys.modules else None
