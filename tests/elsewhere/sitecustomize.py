"""Makes this package find itself on another system: `site` imports this file in each interpreter that the test starts.

What the package imports lacks what `os`, `signal` and others lack there, and there is no `/proc` and no `/sys`. Other
packages see Linux, as it is.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

SYSTEM = os.environ["LOOKS_LIKE"]
LACKS = {
    "darwin": {"os": {"pidfd_open", "sched_getaffinity", "sched_setaffinity"}},
    "win32": {
        "os": {
            *("fork", "getloadavg", "getuid", "killpg", "mkfifo", "pidfd_open", "sched_getaffinity", "setsid"),
            *("O_NONBLOCK", "RTLD_NOLOAD", "WNOHANG"),
        },
        "signal": {"SIGKILL", "SIGHUP"},
        "select": {"poll"},
    },
}[SYSTEM]
NO_MODULE: set[str] = {"darwin": set(), "win32": {"fcntl", "grp", "pwd", "resource", "termios"}}[SYSTEM]


class Elsewhere:
    """A module of the standard library as it is there: it lacks some names, and others have another value."""

    def __init__(self, module: ModuleType, lacks: set[str], has: dict[str, Any]) -> None:
        self.__dict__["_there"] = (module, lacks, has)

    def __getattr__(self, name: str) -> Any:
        module, lacks, has = self.__dict__["_there"]
        if name in lacks:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on {SYSTEM}")
        return has[name] if name in has else getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_there"][0], name, value)


def _no_library(name: str | None, *arguments: Any, **options: Any) -> Any:
    raise OSError(f"there is no library {name} on {SYSTEM}")


_import = builtins.__import__
_has: dict[str, dict[str, Any]] = {"sys": {"platform": SYSTEM}, "ctypes": {"CDLL": _no_library}}


def _import_there(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    importer = str((globals or {}).get("__name__", ""))
    is_ours = importer.partition(".")[0] == "autotune" or str((globals or {}).get("__package__")).startswith("autotune")
    if is_ours and name in NO_MODULE:
        raise ModuleNotFoundError(f"No module named {name!r} on {SYSTEM}", name=name)
    module = _import(name, globals, locals, fromlist, level)
    if is_ours and (name in LACKS or name in _has):
        return Elsewhere(module, LACKS.get(name, set()), _has.get(name, {}))
    return module


def _without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, f"no such place on {SYSTEM}", os.fspath(path))
        return function(path, *arguments, **options)

    return call


builtins.__import__ = _import_there
io.open = _without_proc(io.open)  # which pathlib calls; psutil, which is another one there, calls the built-in
for _name in ("listdir", "scandir", "stat"):
    setattr(os, _name, _without_proc(getattr(os, _name)))
if sys.flags.warn_default_encoding:
    warnings.filterwarnings("ignore", category=EncodingWarning)
    warnings.filterwarnings("error", category=EncodingWarning, module=r"autotune")
