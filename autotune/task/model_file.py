"""Model files: finding one, naming its task, and the modules that they became in this process."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.errors import TaskError

MODULE_PREFIX = "autotune_model_"  # of the names of their modules
_GENERIC_STEMS = frozenset({"model", "train", "main"})


@dataclass(frozen=True)
class Origin:
    """Where a loaded task comes from, and its fields then. A task changed since then no longer matches the file.

    Attributes:
        source: a `TaskSource`: how to load it again.
        loaded: the task's fields when it was loaded.
        warnings: the loader's warnings for the user.
    """

    source: Any
    loaded: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


def find_model_file(spec: str | Path) -> tuple[Path, str]:
    """The absolute path and the attribute that `spec` names. A file name may contain a colon.

    Raises:
        TaskError: no such file, or it is not a Python file; the nearest names are offered.
    """
    path, attribute = Path(spec).expanduser(), ""
    if not path.exists() and ":" in str(spec):
        before, _, after = str(spec).rpartition(":")
        if after.isidentifier():
            path, attribute = Path(before).expanduser(), after
    if path.is_dir():
        inside = sorted(entry.name for entry in path.glob("*.py"))
        named = f"; there is {' and '.join(inside[:3])} in it" if inside else ""
        raise TaskError(
            f"{path} is a folder; expected a Python file such as {path / (inside or ['model.py'])[0]}{named}"
        )
    if not path.exists():
        raise TaskError(f"there is no file {path}{_near_files(path)}; `autotune init {path}` writes one to start from")
    if path.suffix != ".py":
        raise TaskError(f"{path} is not a Python file; expected a model file whose name ends in .py{_near_files(path)}")
    return Path(os.path.abspath(path)), attribute


def name_of(path: Path, attribute: str = "") -> str:
    """A task's short name: the file's, or its folder's where the file has a generic one."""
    stem = path.stem if path.stem not in _GENERIC_STEMS else path.parent.name or path.stem
    return f"{stem}-{attribute}" if attribute not in ("", "task") else stem


def loaded_modules() -> list[ModuleType]:
    """The model files that this process has run, as modules."""
    return [module for name, module in list(sys.modules.items()) if name.startswith(MODULE_PREFIX)]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean this or that?)`, empty where no name is near."""
    near = difflib.get_close_matches(name, list(names), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _near_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    return did_you_mean(path.with_suffix(".py").name, sorted(entry.name for entry in path.parent.glob("*.py")))
