"""Finds what extends the package: classes in the files of one of its rooms, and entry points of other distributions."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from autotune.errors import ConfigError

OWN = "autotune"
T = TypeVar("T")


def find_plugins(
    package: str, base: type[T], group: str, required: tuple[str, ...], taken: Mapping[str, str] | None = None
) -> dict[str, T]:
    """An instance of every subclass of `base`, by its `name`: first those in the files of a room, then those of other packages.

    Args:
        package: the room whose files are looked through; a class that a file only imports does not count.
        group: the group of entry points, each `name = "module:Class"`.
        required: attributes that a subclass of another distribution must have.
        taken: names that are not free -> whose they are.

    Raises:
        ConfigError: a class of another distribution cannot be loaded, or has a name that is taken.
    """
    owners = dict(taken or {})
    instances: dict[str, T] = {}
    for instance, owner, remedy in (*_own(package, base), *_of_others(base, group, required)):
        name: str = instance.name  # type: ignore[attr-defined]
        if name in owners:
            raise ConfigError(
                f"the name {name!r} of {_a(base)} of {owner} is taken by {owners[name]}; rename it, or {remedy}"
            )
        owners[name], instances[name] = owner, instance
    return instances


def _own(package: str, base: type[T]) -> Iterator[tuple[T, str, str]]:
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if file.name.endswith("__main__"):
            continue
        module = importlib.import_module(file.name)
        for value in vars(module).values():
            own = isinstance(value, type) and issubclass(value, base) and value.__module__ == file.name
            if own and hasattr(value, "name"):  # a class without a name is only a base of several
                yield value(), OWN, "remove its file"


def _of_others(base: type[T], group: str, required: tuple[str, ...]) -> Iterator[tuple[T, str, str]]:
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        distribution = entry.dist.metadata["Name"] if entry.dist is not None else entry.value
        remedy = f"remove the package with `pip uninstall {distribution}`"
        try:
            instance = _load(entry, base, required)
        except Exception as error:
            raise ConfigError(
                f"the {base.__name__.lower()} {entry.name!r} of the package {distribution} ({entry.value}) cannot be used: "
                f"{type(error).__name__}: {error}; correct it, or {remedy}"
            ) from error
        yield instance, distribution, remedy


def _a(base: type) -> str:
    noun = base.__name__.lower()
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _load(entry: EntryPoint, base: type[T], required: tuple[str, ...]) -> T:
    kind: Any = entry.load()
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(f"{entry.value} is not a subclass of {base.__module__.removesuffix('.base')}.{base.__name__}")
    if missing := [name for name in required if not hasattr(kind, name)]:
        raise TypeError(f"{kind.__name__} does not say its {', '.join(missing)}")
    return kind()
