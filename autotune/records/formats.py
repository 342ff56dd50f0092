"""Records as plain data and back. Older formats are read; newer ones are refused, with the advice to upgrade."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from autotune.errors import StudyError

_hints_of = cache(get_type_hints)  # a study has thousands of records, and hints written as text are evaluated each time


class Record:
    """A dataclass whose fields are plain data, further records, and tuples, dicts and unions of them."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON-ready data; `from_dict` reverses it, also after JSON."""
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild the record. Keys without a field are ignored: other versions may have written them."""
        record: Self = _rebuild(cls, data)
        return record


class Group(Record):
    """Some fields of a larger record. In that record's data they lie flat beside its own fields; the group's name is not kept."""


def encode(value: Any) -> Any:
    """A value of a record's field as plain data."""
    if isinstance(value, Mapping):  # a config, too
        return {key: encode(item) for key, item in value.items()}
    if is_dataclass(value):
        data: dict[str, Any] = {}
        for field in fields(value):
            item = getattr(value, field.name)
            data |= encode(item) if isinstance(item, Group) else {field.name: encode(item)}
        return data
    return type(value)(map(encode, value)) if isinstance(value, list | tuple) else value


def decode(kind: Any, data: Any) -> Any:
    """Rebuild a value of type `kind` from what `encode` made of it; JSON may lie between."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        records = [one for one in inner if is_dataclass(one) or get_origin(one)]
        return (
            decode(max(records, key=lambda one: _num_known(one, data)), data) if records and data is not None else data
        )
    if origin is tuple:
        kinds = [inner[0]] * len(data) if inner[-1] is Ellipsis else inner
        return tuple(decode(each, item) for each, item in zip(kinds, data, strict=True))
    if origin is dict:
        return {key: decode(inner[1], item) for key, item in data.items()}
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_dict(data)  # it may know older names of its fields
    if is_dataclass(kind):
        return _rebuild(kind, data)
    return kind(data) if isinstance(kind, type) and issubclass(kind, Enum) else data


def _rebuild(kind: Any, data: Mapping[str, Any]) -> Any:
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r:.80} is no {kind.__name__}; expected its fields by name")
    found = {}
    for name, hint in _hints_of(kind).items():
        if isinstance(hint, type) and issubclass(hint, Group):
            found[name] = decode(hint, data)
        elif name in data:
            found[name] = decode(hint, data[name])
    return kind(**found)


def _num_known(kind: Any, data: Any) -> int:
    is_record = isinstance(kind, type) and is_dataclass(kind)
    return sum(name in data for name in _hints_of(kind)) if is_record else 0


def require_readable(what: str, found: int, newest: int) -> None:
    """Refuse what a later version wrote.

    Raises:
        StudyError: `found` is above `newest`.
    """
    if found > newest:
        raise StudyError(
            f"{what} has format {found}, this autotune reads up to {newest}; "
            "upgrade it: pip install --upgrade autotune-torch"
        )
