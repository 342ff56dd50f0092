"""autotune: the fastest way to train this PyTorch model on this machine, found by really training it.

result = autotune.search("model.py", budget="2m")
session = autotune.prepare("model.py", result.config)
for batch in session.loader:
    loss = session.step(batch)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autotune.lazy import give as _give
from autotune.version import __version__ as __version__

if TYPE_CHECKING:
    from autotune.api import explain, predict, search, search_command
    from autotune.session import Session, prepare
    from autotune.study.reading import load_study
    from autotune.task import Task, load_task

__all__ = ["Session", "Task", "explain", "load_study", "load_task", "predict", "prepare", "search", "search_command"]

_HOMES = {
    "Session": "autotune.session",
    "Task": "autotune.task",
    "explain": "autotune.api",
    "load_study": "autotune.study.reading",
    "load_task": "autotune.task",
    "predict": "autotune.api",
    "prepare": "autotune.session",
    "search": "autotune.api",
    "search_command": "autotune.api",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch, optuna and pandas take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported when it is first called."""
    return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)


_give(
    in_short=_later("autotune.report.answer", "in_short"),
    page=_later("autotune.report.answer", "page"),
    export=_later("autotune.export", "of_result"),
    task_of_loop=_later("autotune.integrations.loops", "task_of"),
)

if "IPython" in sys.modules:
    importlib.import_module("autotune.notebook").register()
