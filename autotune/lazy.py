"""What is used before it is imported: torch, and the work behind public methods whose classes live below it. And what is imported
before it is used, while the process would wait.

Whoever searches needs no torch, and importing it takes seconds: it is imported when it is first used. `print(result)` is rendered by
`report`, `result.export` by `export`, `Task.from_loader` by `integrations`. None of these classes imports them:
`autotune/__init__`, which runs before every other file of the package, gives it to them here.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Lazy:
        def __getattr__(self, attribute: str) -> Any:
            if "_module" not in vars(self):
                self._module = importlib.import_module("torch")
            return getattr(self._module, attribute)

    torch = _Lazy()
Function = Callable[..., Any]
_GIVEN: dict[str, Function] = {}


def torch_if_imported() -> Any | None:
    """torch's module where this process has imported it, None where it has not. Waits for another thread that imports it now."""
    return importlib.import_module("torch") if "torch" in sys.modules else None


def import_ahead(*modules: str) -> threading.Thread:
    """Import modules in a thread, while this process waits for another one. Whoever needs one of them earlier waits for it."""

    def import_all() -> None:
        for name in modules:
            with contextlib.suppress(Exception):  # who needs it meets the error
                importlib.import_module(name)

    thread = threading.Thread(target=import_all, name="imports", daemon=True)
    thread.start()
    return thread


def give(**functions: Function) -> None:
    """Give the work behind public methods, by name."""
    _GIVEN.update(functions)


def given(name: str) -> Function:
    """The work behind a public method.

    Raises:
        KeyError: nothing was given by that name.
    """
    return _GIVEN[name]
