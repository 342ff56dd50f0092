"""What users are told of their own code: its exceptions as one paragraph with the frames of their files; its values in words.

A value is described by types, element types and shapes; of a tensor the contents are never told.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, TaskError
from autotune.lazy import torch

_PASS_ON = ("__torch_function__", "__torch_dispatch__")  # of torch's modes, which the user's operators pass through
_MAX_TEXT = 400  # characters of an exception's own text in a message; the traceback beside it has the whole text
_ALLOCATION_FAILURES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_MAX_ITEMS = 6  # of a collection that is described


@contextmanager
def user_code(what: str, next_step: str = "correct it there and run again") -> Iterator[None]:
    """Run user code; its exceptions become a TaskError that names them, the line, and the next step.

    A failed allocation is raised unchanged, even if the user's code wrapped it: it is a finding, not a mistake.

    Args:
        what: whose code runs, e.g. `your training_step`.
        next_step: what to do about an exception in it.
    """
    try:
        yield
    except AutotuneError:
        raise
    except (Exception, SystemExit) as error:
        if is_allocation_failure(error):
            raise
        if isinstance(error, SyntaxError):
            next_step = "correct that line and run again"
        if isinstance(error, ModuleNotFoundError) and error.name:
            next_step = f"install {error.name} into this environment ({sys.executable}), or put it beside your model file or script"
        raise TaskError(f"{what} {_happened(error)}; {next_step}", frames=user_frames(error)) from error


def is_allocation_failure(error: BaseException) -> bool:
    """Whether `error`, or an exception that led to it, is a failed allocation of torch or Python."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(link, RuntimeError) and any(mark in str(link) for mark in _ALLOCATION_FAILURES):
            return True
        link = link.__cause__ or link.__context__
    return False


def user_frames(error: BaseException) -> str:
    """The traceback of `error` and its causes, without the frames of Python, installed packages and this package."""
    whole = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = whole
    while link is not None:
        link.stack = traceback.StackSummary.from_list([frame for frame in link.stack if is_user_file(frame.filename)])
        link = link.__cause__ or link.__context__
    if not whole.stack and whole.__cause__ is None and whole.__context__ is None:
        return "".join(whole.format_exception_only())
    return "".join(whole.format())


def arose_in_autotune(error: BaseException) -> bool:
    """Whether the line that raised `error` is this package's, and not the user's or that of a library the user called.

    A full disk and the like, and an error that the package raises for the user to read, do not count. Nor does an error that
    torch raises in an operator of the user's, where this package merely forwarded the call.
    """
    if not isinstance(error, Exception) or isinstance(error, AutotuneError | OSError):
        return False
    frames = reversed(traceback.extract_tb(error.__traceback__))
    own = list(itertools.takewhile(lambda frame: os.path.abspath(frame.filename).startswith(_package_folder()), frames))
    passes_on = type(error) is RuntimeError and any(frame.name in _PASS_ON for frame in own)
    return bool(own) and not passes_on


def is_user_file(filename: str) -> bool:
    """Whether a source file is the user's: not the standard library's, an installed package's, or this package's."""
    if filename.startswith("<") and not filename.startswith("<ipython"):
        return False
    path = os.path.abspath(filename)
    if {"site-packages", "dist-packages"} & set(Path(path).parts):
        return False
    return not path.startswith(_foreign_folders())


@functools.cache
def _foreign_folders() -> tuple[str, ...]:
    library = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    library |= {os.path.realpath(folder) for folder in library}
    return (*(os.path.join(folder, "") for folder in library), _package_folder())


@functools.cache
def _package_folder() -> str:
    return os.path.join(Path(__file__).resolve().parent.parent, "")


def _happened(error: BaseException) -> str:
    """`raised ValueError: bad shape (model.py, line 12)`."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}){user_place(error)}"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    first_line = next(iter(text.strip().splitlines()), "")[:_MAX_TEXT].rstrip(".")
    return f"raised {type(error).__name__}{': ' if first_line else ''}{first_line}{user_place(error)}"


def user_place(error: BaseException) -> str:
    """` (model.py, line 12)`: the user's own line that raised `error`; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        line = f": `{error.text.strip()[:120]}`" if error.text else ""
        return f" ({os.path.basename(error.filename)}, line {error.lineno}{line})"
    return innermost_place(traceback.extract_tb(error.__traceback__))


def innermost_place(stack: traceback.StackSummary) -> str:
    """` (model.py, line 12)`: the user's own innermost line of a stack; empty where there is none."""
    frames = [frame for frame in stack if is_user_file(frame.filename)]
    return f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""


def describe(value: Any) -> str:
    """`(x, y)` -> `a tuple of 2 (a float32 tensor of shape (2, 8), an int64 tensor of shape (2,))`."""
    if isinstance(value, torch.Tensor):
        kind = element_type(value)
        return f"{_article(kind)} {kind} tensor of shape {shape(value)}"
    if isinstance(value, Mapping):
        items = [f"{key}: {describe(item)}" for key, item in list(value.items())[:_MAX_ITEMS]]
        return f"{_a(value)} with {len(value)} keys ({_join(items, len(value))})"
    if isinstance(value, list | tuple):
        return f"{_a(value)} of {len(value)} ({_join([describe(item) for item in value[:_MAX_ITEMS]], len(value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        items = [f"{name}: {describe(getattr(value, name))}" for name in names[:_MAX_ITEMS]]
        return f"{_a(value)} ({_join(items, len(names))})"
    if value is None or isinstance(value, bool | int | float):
        return repr(value) if value is None else f"the {type(value).__name__} {value!r}"
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return f"the class {value.__name__}" if isinstance(value, type) else _a(value)


def element_type(tensor: torch.Tensor) -> str:
    """`float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def shape(tensor: torch.Tensor) -> str:
    """`(2, 8)`; of a nested tensor `(2, ...)`."""
    return f"({tensor.size(0)}, ...)" if tensor.is_nested else str(tuple(tensor.shape))


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{_article(name)} {name}"


def _article(name: str) -> str:
    return "an" if name[:1].lower() in "aeiou" else "a"


def _join(items: list[str], total: int) -> str:
    return ", ".join(items) + (", ..." if total > len(items) else "")
