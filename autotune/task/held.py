"""What the functions of a task hold, as text: one script may make several tasks of the same code with other values in it."""

from __future__ import annotations

import argparse
import inspect
import itertools
import numbers
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from autotune.lazy import torch
from autotune.task.usercode import is_user_file

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in a repr; it differs between processes
_MOST_ITEMS = 10_000  # values that are looked at, nearest first: a function may hold a dataset
_PLAIN = (str, bytes, numbers.Number, PurePath, type(None), slice, range)
_OF_A_RUN = (float, str, bytes, PurePath)  # the types of a time, of a run's name and of its folder
_NAMESPACES = (argparse.Namespace, SimpleNamespace)

Opened = tuple[str, Iterable[Any]]  # a value's own text, and the values that it holds
Place = tuple[Any, int | str]  # where a value is held: the place of its holder, and its position or name there


@runtime_checkable
class Living(Protocol):
    """An object that lives in the user's process and whose methods are functions of a task."""

    def task_identity(self) -> str:
        """A text that tells it from others in the same script; equal in each run of the script but for memory addresses."""


def held_by(*functions: Any) -> str:
    """The code of the user's functions and the plain values that they hold; equal in each run of an unchanged script.

    Of tensors it has shapes and types, of models their `repr`, of other people's objects only the class. Of the user's objects it leaves
    out texts, paths and numbers with a fraction whose attribute neither their class nor its constructor names: the time of a run, the
    folder or the name that a run was given.
    """
    return "\n".join(text for _, text, _ in _walk(functions))


def tensors_held_by(*functions: Any) -> Iterator[tuple[Place, str, torch.Tensor]]:
    """The tensors that the user's functions hold, each with its place and the class of the module that it belongs to, or nothing."""
    for place, _, value in _walk(functions):
        if isinstance(value, torch.nn.Module):
            named = itertools.chain(value.named_parameters(), value.named_buffers())
            yield from (((place, name), type(value).__name__, tensor) for name, tensor in named)
        elif isinstance(value, torch.Tensor):
            yield place, "", value


def _walk(functions: Iterable[Any]) -> Iterator[tuple[Place, str, Any]]:
    """The values that functions hold, these included, nearest first: each with its place, as text, and itself where it is new."""
    waiting = deque[tuple[Place, Any]](((None, position), function) for position, function in enumerate(functions))
    known = dict[int, tuple[int, Any]]()
    for number in range(_MOST_ITEMS):
        if not waiting:
            return
        place, value = waiting.popleft()
        if id(value) in known:
            yield place, f"again {known[id(value)][0]}", None
            continue
        text, held = _open(value)
        inner = list(itertools.islice(held, _MOST_ITEMS))
        if not isinstance(value, _PLAIN):  # functions may hold each other; a value that is kept keeps its id
            known[id(value)] = number, value
        waiting.extend(((place, position), one) for position, one in enumerate(inner))
        yield place, f"{_ADDRESS.sub('', text)} {len(inner)}", value


def _open(value: Any) -> Opened:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (*_PLAIN, torch.dtype, torch.device)):
        return f"{kind} {value!r}", ()
    if isinstance(value, type | ModuleType):
        return f"{kind} {getattr(value, '__module__', '')} {value.__name__}", ()
    if isinstance(value, Living):
        return f"{kind} {value.task_identity()}", ()
    if isinstance(value, torch.Tensor):
        return f"{kind} {value.dtype} {_shape(value)}", ()
    if isinstance(value, set | frozenset):  # in the order of its texts: its own differs between processes
        return f"{kind} {sorted(repr(item) for item in value if isinstance(item, _PLAIN))}", ()
    if isinstance(value, dict):
        return kind, itertools.chain.from_iterable(value.items())
    if isinstance(value, list | tuple | deque):
        return f"{kind} {len(value)}", value
    return _open_function(value) or _open_object(kind, value)


def _open_function(value: Any) -> Opened | None:
    if isinstance(value, partial):
        return "partial", (value.func, value.args, value.keywords)
    if isinstance(value, MethodType):
        return "method", (value.__func__, value.__self__)
    if not isinstance(value, FunctionType):
        return None
    text = f"function {value.__module__}.{value.__qualname__}"
    held: list[Any] = [value.__defaults__, value.__kwdefaults__, [_content(cell) for cell in value.__closure__ or ()]]
    if is_user_file(value.__code__.co_filename):
        names = dict.fromkeys(_names(value.__code__))
        held += [value.__code__.co_code, list(_constants(value.__code__))]
        held += [{name: value.__globals__[name] for name in names if name in value.__globals__}]
    return text, held


def _open_object(kind: str, value: Any) -> Opened:
    is_users = _is_users(type(value))
    if isinstance(value, torch.nn.Module):
        own = vars(value) if is_users else {}
        public = {name: held for name, held in own.items() if not name.startswith("_") and name != "training"}
        return f"{kind} {value!r}", (*map(_shape, value.parameters()), public)
    state = object.__getstate__(value) if is_users or isinstance(value, _NAMESPACES) else None
    if is_users and isinstance(state, dict):
        state = _lasting(type(value), state)
    # of a built-in function the name is all that there is
    return f"{kind} {getattr(value, '__qualname__', '')}", (getattr(value, "__wrapped__", None), state)


def _lasting(kind: type, state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a user's object that do not look like those of one run."""
    named = _named_by(kind)
    return {name: held for name, held in state.items() if name.lstrip("_") in named or not isinstance(held, _OF_A_RUN)}


def _named_by(kind: type) -> set[str]:
    """The attributes of a class and the arguments of its constructor, those of its bases included, without underscores in front."""
    named = set[str]()
    for base in kind.__mro__[:-1]:
        named.update(vars(base), inspect.get_annotations(base))
        init = vars(base).get("__init__")
        if isinstance(init, FunctionType):
            code = getattr(inspect.unwrap(init), "__code__", None)
            named.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ())
    return {name.lstrip("_") for name in named}


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if torch.nn.parameter.is_lazy(tensor) or tensor.is_nested else tuple(tensor.shape)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # its variable has no value yet
        return None


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function and those inside it look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _constants(code: CodeType) -> Iterator[Any]:
    """The constants of a function and of those inside it, with these functions' own code."""
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_code
            yield from _constants(constant)
        else:
            yield constant


def _is_users(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and is_user_file(file)
