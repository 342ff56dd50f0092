"""Finds every technique: those of this package, a file each, and those that other distributions bring as entry points."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

from autotune.errors import ConfigError
from autotune.records.batch_plan import BATCH_KEYS
from autotune.techniques.base import Technique

GROUP = "autotune.techniques"  # entry points: `name = "module:Class"`
_OWN = "autotune"
_REQUIRED = ("name", "summary", "listed_choices", "applies", "off", "phase")


class Registry(Mapping[str, Technique]):
    """Techniques by name, in the order of phase, `order` and name. Found when it is first asked."""

    @cached_property
    def _techniques(self) -> dict[str, Technique]:
        found: dict[str, Technique] = {}
        owners = dict.fromkeys(BATCH_KEYS, f"{_OWN}, for the batch")
        for technique, owner, remedy in (*_own(), *_of_others()):
            if technique.name in owners:
                raise ConfigError(
                    f"the name {technique.name!r} of a technique of {owner} is taken by {owners[technique.name]}; "
                    f"rename it, or {remedy}"
                )
            owners[technique.name] = owner
            found[technique.name] = technique
        ranked = sorted(found.values(), key=lambda technique: (technique.phase, technique.order, technique.name))
        return {technique.name: technique for technique in ranked}

    def __getitem__(self, name: str) -> Technique:
        return self._techniques[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._techniques)

    def __len__(self) -> int:
        return len(self._techniques)


def _own() -> Iterator[tuple[Technique, str, str]]:
    """The techniques of this package; what a file imports is not its own."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            for value in vars(module).values():
                own = isinstance(value, type) and issubclass(value, Technique) and value.__module__ == found.name
                if own and not inspect.isabstract(value):
                    yield value(), _OWN, "remove its file"


def _of_others() -> Iterator[tuple[Technique, str, str]]:
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        distribution = entry.dist.metadata["Name"] if entry.dist is not None else entry.value
        remedy = f"remove the package with `pip uninstall {distribution}`"
        try:
            technique = _loaded(entry)
        except Exception as error:
            raise ConfigError(
                f"the technique {entry.name!r} of the package {distribution} ({entry.value}) cannot be used: "
                f"{type(error).__name__}: {error}; correct it, or {remedy}"
            ) from error
        yield technique, distribution, remedy


def _loaded(entry: EntryPoint) -> Technique:
    """The technique that an entry point names.

    Raises:
        TypeError: it is no complete subclass of `Technique`.
    """
    kind = entry.load()
    if not (isinstance(kind, type) and issubclass(kind, Technique)):
        raise TypeError(f"{entry.value} is not a subclass of autotune.techniques.Technique")
    if missing := [name for name in _REQUIRED if not hasattr(kind, name)]:
        raise TypeError(f"{kind.__name__} does not say its {', '.join(missing)}")
    technique: Technique = kind()
    return technique
