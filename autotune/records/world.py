"""The processes that train one model together, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.formats import Record


@dataclass(frozen=True, kw_only=True)
class World(Record):
    """One process's place among those that train one model together: one of `size`, counted from 0 by `rank`."""

    size: int = 1
    rank: int = 0
