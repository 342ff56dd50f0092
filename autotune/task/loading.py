"""Loading a task from a model file: its functions by name, a LightningModule, or a `Task` object."""

from __future__ import annotations

import difflib
import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from autotune.errors import TaskError
from autotune.task import adapters, handed_over
from autotune.task.model_file import (
    CONSTANTS,
    MODULE_PREFIX,
    SIGNATURES,
    did_you_mean,
    find_model_file,
    loaded_modules,
    name_of,
)
from autotune.task.process_settings import apply_settings
from autotune.task.source import TaskSource, origin_of
from autotune.task.task import Task
from autotune.task.usercode import user_code, user_frames

_NAMES = (*SIGNATURES, *CONSTANTS)
_running: list[Path] = []  # model files that are being executed
_MISSPELT = 0.8  # similarity from which a name is taken for a misspelt one of ours


def load_task(spec: str | Path) -> Task:
    """Load a task from `model.py`, or the object `name` from `model.py:name`.

    The file runs as a module that stays in `sys.modules`, with its folder first on `sys.path`. The task is the first of
    these that the file has: `build_model` with the other functions and constants of a model file; a `Task` named `task`;
    one LightningModule class that needs no arguments.

    Raises:
        TaskError: no such file, an exception while it is imported (with the user's frames), or no task in it.
    """
    return load_file(*find_model_file(spec))


def load_file(path: Path, attribute: str = "") -> Task:
    """Load the task from an absolute path; see `load_task`."""
    module = _run(path)
    warnings: tuple[str, ...] = ()
    try:
        if attribute:
            task = _named(module, attribute)
        elif hasattr(module, "build_model"):
            task, warnings = _from_functions(module, module.build_model), _misspelt(module)
        elif isinstance(getattr(module, "task", None), Task):
            task, attribute = module.task, "task"
        else:
            task, warnings = _from_lightning(module), _misspelt(module)
    except TaskError as error:
        raise TaskError(f"{path.name}: {error}", frames=error.frames) from None
    if task.name == "task":
        task = replace(task, name=name_of(path, attribute))
    source = replace(TaskSource.of(path), attribute=attribute)
    return replace(task, origin=origin_of(task, source, warnings))


def load_source(source: TaskSource) -> Task:
    """Make a task in this process. It changes to the source's `cwd`, adds the missing folders of its `sys_path`, and sets in torch what
    the process had set that built a Task.

    Raises:
        TaskError: as `load_task`.
    """
    if os.path.isdir(source.cwd):
        os.chdir(source.cwd)
    sys.path.extend(entry for entry in source.sys_path if entry not in sys.path)
    task = load_file(Path(source.path), source.attribute) if source.path else source.live or _unpickle(source)
    return replace(task, **source.overrides)


def _unpickle(source: TaskSource) -> Task:
    apply_settings(source.settings)
    with user_code("unpickling the task", "move its functions into a file model.py and give its path"):
        task = handed_over.load(source.pickled)
    assert isinstance(task, Task)
    return replace(task, origin=origin_of(task, replace(source, overrides={})))


class _ModelLoader(importlib.machinery.SourceFileLoader):
    """Compiles a model file each time, without the byte-code cache: the user is editing it."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file as it is now."""
        code = self.source_to_code(self.get_data(self.path), self.path)
        assert isinstance(code, CodeType)
        return code


def runs_model_file() -> bool:
    """Whether a model file is being executed: what it says of a batch is of all processes together, as `GLOBAL_BATCH` is."""
    return bool(_running)


def _run(path: Path) -> ModuleType:
    folder = path.resolve().parent
    _forget_siblings(folder)
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:12]
    name = f"{MODULE_PREFIX}{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_ModelLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    arguments, sys.argv = sys.argv, [str(path)]  # a parser at the top of the file must not read ours
    sys.modules[name] = module
    _running.append(path)
    try:
        with user_code(f"importing {path.name}", "correct it, and keep what trains under `if __name__ == '__main__':`"):
            spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, TaskError) and not error.frames:  # a Task made in the file is not valid
            raise TaskError(f"importing {path.name}: {error}", frames=user_frames(error)) from None
        raise
    finally:
        _running.pop()
        sys.argv = arguments
    return module


def _forget_siblings(folder: Path) -> None:
    """Drop imported neighbours of other model files that would hide a module of the same name in `folder`."""
    folders = {os.path.dirname(os.path.realpath(module.__file__)) for module in loaded_modules() if module.__file__}
    others = tuple(os.path.join(other, "") for other in folders - {str(folder)})
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(others) and not name.startswith(MODULE_PREFIX):
            top = folder / name.split(".")[0]
            if top.is_dir() or top.with_suffix(".py").is_file():
                del sys.modules[name]


def _from_functions(module: ModuleType, build_model: Any) -> Task:
    parts: dict[str, Any] = {name: getattr(module, name, None) for name in SIGNATURES} | {"build_model": build_model}
    parts |= {name.lower(): getattr(module, name, None) for name in CONSTANTS}
    if parts["make_batch"] is None and parts["train_dataset"] is None and not adapters.may_have_data(build_model):
        own = [name for name in vars(module) if name not in _NAMES]
        raise adapters.no_data(build_model, did_you_mean("make_batch", own) or did_you_mean("train_dataset", own))
    return Task(**parts)


def _from_lightning(module: ModuleType) -> Task:
    classes = [
        value
        for value in vars(module).values()
        if adapters.is_lightning_class(value) and value.__module__ == module.__name__
    ]
    leaves = [cls for cls in classes if not any(other is not cls and issubclass(other, cls) for other in classes)]
    if len(leaves) > 1:
        names = " and ".join(cls.__name__ for cls in leaves)
        raise TaskError(
            f"there are {len(leaves)} LightningModules ({names}) and no build_model(); expected one: pass it as "
            f"{Path(str(module.__file__)).name}:{leaves[0].__name__}, or write a build_model() that returns it"
        )
    if not leaves:
        raise _nothing_found(module)
    return _from_lightning_class(module, leaves[0])


def _from_lightning_class(module: ModuleType, cls: Any) -> Task:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise TaskError(
            f"the LightningModule {cls.__name__} cannot be made without arguments: {error}; give them default values, "
            f"or write `def build_model(): return {cls.__name__}(...)`"
        ) from None
    return _from_functions(module, cls)


def _named(module: ModuleType, attribute: str) -> Task:
    value = getattr(module, attribute, None)
    if isinstance(value, Task):
        return value
    if adapters.is_lightning_class(value):
        return _from_lightning_class(module, value)
    tasks = [name for name, item in vars(module).items() if isinstance(item, Task)]
    offered = f"; its Task objects are {', '.join(tasks)}" if tasks else ""
    if not hasattr(module, attribute):
        raise TaskError(
            f"the model file has no {attribute}{did_you_mean(attribute, tasks)}{offered}; "
            f"define `{attribute} = autotune.Task(...)`"
        )
    raise TaskError(
        f"{attribute} is of type {type(value).__name__}; expected an autotune.Task{offered}; for a file with "
        "build_model(), leave the name out"
    )


def _nothing_found(module: ModuleType) -> TaskError:
    own = [name for name, item in vars(module).items() if callable(item) and not name.startswith("_")]
    tasks = [name for name, item in vars(module).items() if isinstance(item, Task)]
    if tasks:
        return TaskError(
            f"there is no build_model(), but there is a Task named {tasks[0]}: pass it as "
            f"{Path(str(module.__file__)).name}:{tasks[0]}"
        )
    near = did_you_mean("build_model", own)
    return TaskError(
        f"there is no function build_model(){near}; expected build_model() that returns the model, and "
        "make_batch(batch_size) or train_dataset(): `autotune init` writes a file to start from"
    )


def _misspelt(module: ModuleType) -> tuple[str, ...]:
    """Warnings for names that look like misspelt names of ours, which would be ignored in silence."""
    own = [
        name
        for name, item in vars(module).items()
        if name not in _NAMES and (name.isupper() or getattr(item, "__module__", None) == module.__name__)
    ]
    missing = [name for name in _NAMES if not hasattr(module, name)]
    return tuple(
        f"{name} in the model file is not used; if {near} was meant, rename it"
        for name in own
        for near in difflib.get_close_matches(name, missing, n=1, cutoff=_MISSPELT)
    )
