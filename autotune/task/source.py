"""Passes a task to another process: as the model file's path, or as a file that holds a Task built in Python."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from autotune.errors import TaskError
from autotune.lazy import torch
from autotune.task.held import Living, held_by
from autotune.task.model_file import Origin, find_model_file, loaded_modules, name_of
from autotune.task.process_settings import own_settings
from autotune.task.task import Task
from autotune.task.usercode import is_user_file

# fields whose values may differ from the model file's: they travel beside it
_PLAIN = frozenset({"global_batch", "baseline", "max_grad_norm", "name"})
_STARTUP = ("sitecustomize", "usercustomize")  # imported in every process of an environment, e.g. an editor's console


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """Where a task comes from, as plain data.

    Attributes:
        path: the model file, absolute; empty for a Task built in Python.
        attribute: name of the Task object in that file; empty for its functions.
        overrides: constants that were replaced since the file was loaded.
        pickled: the file that holds a Task built in Python, once `hand_over` has written it; empty for a model file.
        digest: a sha256 of what a Task built in Python is made of; empty for a model file.
        live: a Task built in Python, in the process that built it.
        sys_path: the folders that modules were imported from.
        cwd: the working directory, for the task's own relative paths.
        task_name: the name of a Task built in Python; empty for a model file.
        settings: what is set in torch where a Task built in Python trains; empty for a model file.
    """

    path: str = ""
    attribute: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    pickled: str = ""
    digest: str = ""
    live: Task | None = None
    sys_path: tuple[str, ...] = ()
    cwd: str = ""
    task_name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(task: Task | str | Path) -> TaskSource:
        """The source of a task, or of a model file, which is not run.

        Raises:
            TaskError: no such file.
        """
        place = {"sys_path": tuple(os.path.abspath(entry) for entry in sys.path), "cwd": os.getcwd()}
        if not isinstance(task, Task):
            path, attribute = find_model_file(task)
            return TaskSource(path=str(path), attribute=attribute, **place)  # type: ignore[arg-type]
        if task.origin is not None:
            changed = {name for name, value in task.origin.loaded.items() if getattr(task, name) is not value}
            if changed <= _PLAIN:
                known: TaskSource = task.origin.source
                return replace(known, overrides={name: getattr(task, name) for name in sorted(changed)})
        own = {"task_name": task.name, "settings": own_settings() | dict(task.settings)}
        return TaskSource(live=replace(task, origin=None), **own, **place)  # type: ignore[arg-type]

    def hand_over(self, folder: Path) -> TaskSource:
        """The same source for other processes, which find a Task built in Python in a file of `folder`.

        Each tensor is written once, whatever shares it. Reading a GPU's tensors takes no GPU.

        Raises:
            TaskError: the task cannot be pickled.
        """
        if self.live is None:
            return self
        file = folder / "task.pt"
        _save(self.live, file)
        with file.open("rb") as content:
            digest = self.script_digest() or hashlib.file_digest(content, "sha256").hexdigest()
        return replace(self, live=None, pickled=str(file), digest=digest)

    def script_digest(self) -> str:
        """A sha256 of the script that built a Task, its arguments, the task's baseline and what the task's functions hold; empty
        without a script.

        The task's own bytes would not do: the classes of a script are pickled otherwise in each process.
        """
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        if self.live is None or script is None or not is_user_file(script) or not os.path.isfile(script):
            return ""
        # a script may tune several models in turn, or read what it tunes from a file
        functions = [part for part in self._parts() if callable(part)]
        arguments = repr((sys.argv[1:], self.live.baseline, held_by(*functions))).encode()
        return hashlib.sha256(Path(script).read_bytes() + arguments).hexdigest()

    @property
    def version(self) -> str:
        """What tells a Task built in Python from others of its name: an edited script makes another one.

        Without a script, a model that lives in the user's process cannot be recognised, so each call makes another version.
        """
        return self.script_digest()[:8] or (time.strftime("%Y%m%d-%H%M%S") if self._lives() else "")

    def with_global_batch(self, global_batch: int | None) -> TaskSource:
        """The same task with another global batch; None keeps the task's own."""
        return (
            self if global_batch is None else replace(self, overrides={**self.overrides, "global_batch": global_batch})
        )

    @property
    def name(self) -> str:
        """A short name for the study, known without running the user's code."""
        if not self.path:
            return self.task_name
        return name_of(Path(self.path), self.attribute)

    @property
    def label(self) -> str:
        """The task's name in messages: the model file's path, relative if it lies below the working directory."""
        if not self.path:
            return "the task built in Python"
        here = os.path.join(os.getcwd(), "")
        return self.path.removeprefix(here)

    @property
    def spec(self) -> str:
        """The task's name for a command and for `prepare`: `model.py` or `model.py:task`.

        Empty for a task built in Python, or changed there in ways that a config and `--global-batch` cannot express.
        """
        changed = {name for name, value in self.overrides.items() if name != "global_batch" or value is None}
        if not self.path or not changed <= {"baseline", "name"}:
            return ""
        return f"{self.label}:{self.attribute}" if self.attribute else self.label

    @property
    def made_by(self) -> str:
        """The call that made the task of what an integration tunes; empty for any other, and once it is handed over."""
        return "" if self.live is None else self.live.made_by

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data; `from_dict` reverses it. A Task built in Python is handed over first."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        plain = {"overrides": dict(self.overrides), "settings": dict(self.settings), "sys_path": list(self.sys_path)}
        return data | plain

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TaskSource:
        """Rebuild a source from `to_dict`'s data."""
        return TaskSource(**{**data, "sys_path": tuple(data["sys_path"])})

    def _lives(self) -> bool:
        """Whether a part of the task lives in the user's process."""
        return any(isinstance(getattr(part, "__self__", None), Living) for part in self._parts())

    def _parts(self) -> list[Any]:
        return [] if self.live is None else [getattr(self.live, item.name) for item in fields(self.live)]


def origin_of(task: Task, source: TaskSource, warnings: tuple[str, ...] = ()) -> Origin:
    """The origin to attach to a task that was just loaded from `source`."""
    loaded = {item.name: getattr(task, item.name) for item in fields(task) if item.name != "origin"}
    return Origin(source, loaded, warnings)


def source_hash(task: Task | TaskSource) -> str:
    """A sha256 that changes with the task's code: 64 hexadecimal digits.

    It covers the model file and the user's own modules that this process has imported. For a Task built in Python it
    covers the script that built it, or, where there is none, the bytes that hand it over. The hash is stable between processes
    that load only this task and take the hash at the same point. The standard library, installed packages and this
    package are not covered; their versions identify them.
    """
    source = TaskSource.of(task) if isinstance(task, Task) else task
    return _hash(_files(source), f"{source.attribute}\0{source.digest}")


def imported_hash() -> str:
    """A sha256 of the user's own modules that this process has imported, of a script that is no task; stable as `source_hash` is."""
    return _hash(dict(imported_files()))


def _hash(files: Mapping[str, Path], beginning: str = "") -> str:
    digest = hashlib.sha256(beginning.encode())
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _files(source: TaskSource) -> dict[str, Path]:
    """The files of a task's code: those below the model file's folder by their path from there, others by module name."""
    model = Path(source.path).resolve() if source.path else None
    files = {} if model is None else {model.name: model}
    for name, file in imported_files():
        if model is not None and file.is_relative_to(model.parent):
            files[file.relative_to(model.parent).as_posix()] = file
        else:
            files[name] = file
    return files


def imported_files() -> Iterator[tuple[str, Path]]:
    """Name and file of the user's own modules imported so far that belong to the task."""
    others = {*_STARTUP, *(module.__name__ for module in loaded_modules())}
    for name, module in sys.modules.copy().items():
        package = sys.modules.get(name.partition(".")[0], module)
        # installed packages write modules into caches, too, as torch.compile does its kernels
        if name not in others and _is_users(module) and (_file(package) is None or _is_users(package)):
            yield name, Path(str(_file(module))).resolve()


def _is_users(module: ModuleType) -> bool:
    file = _file(module)
    return file is not None and is_user_file(file) and os.path.isfile(file)


def _file(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else None


def _save(task: Task, file: Path) -> None:
    import cloudpickle

    by_value = loaded_modules()
    for module in by_value:  # another process cannot import a model file by name
        cloudpickle.register_pickle_by_value(module)
    try:
        torch.save(task, file, pickle_module=cloudpickle)
    except Exception as error:
        raise TaskError(
            f"the task {task.name!r} cannot be sent to another process ({type(error).__name__}: {error}); build "
            "models, datasets and files inside its functions, or move them into a file model.py and give its path"
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)
