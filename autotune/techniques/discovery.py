"""Finds every technique: those of this package, a file each, and those that other distributions bring as entry points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

from autotune import plugins
from autotune.records.batch_plan import BATCH_KEYS
from autotune.techniques.base import Technique

GROUP = "autotune.techniques"  # entry points: `name = "module:Class"`
_REQUIRED = ("name", "summary", "applies", "off", "phase")


class Registry(Mapping[str, Technique]):
    """Techniques by name, in the order of phase, `order` and name. Found when it is first asked."""

    @cached_property
    def _techniques(self) -> dict[str, Technique]:
        package = __name__.rpartition(".")[0]
        taken = dict.fromkeys(BATCH_KEYS, "autotune, for the batch")
        found = plugins.find_plugins(package, Technique, GROUP, _REQUIRED, taken)  # type: ignore[type-abstract]
        ranked = sorted(found.values(), key=lambda technique: (technique.phase, technique.order, technique.name))
        return {technique.name: technique for technique in ranked}

    @contextmanager
    def only(self, techniques: Iterable[Technique]) -> Iterator[None]:
        """Hold these alone for a while: a search by command knows the switches of its script, and no technique."""
        own = self._techniques
        self.__dict__["_techniques"] = {technique.name: technique for technique in techniques}
        try:
            yield
        finally:
            self.__dict__["_techniques"] = own

    def __getitem__(self, name: str) -> Technique:
        return self._techniques[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._techniques)

    def __len__(self) -> int:
        return len(self._techniques)
