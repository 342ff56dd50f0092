"""A value in words, for error messages: types, element types and shapes, never contents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.lazy import torch

_MAX_ITEMS = 6


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
