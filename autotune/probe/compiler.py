"""What torch's compiler has done in this process, by its own counters."""

from __future__ import annotations

import sys
from typing import Any


def num_graphs() -> int:
    """Number of graphs that torch's compiler has made in this process, or taken from the cache."""
    counters = _compiler_counters()
    return int(counters["stats"]["unique_graphs"]) if counters else 0


def num_graph_breaks() -> int:
    """Number of places where compiled code goes back to Python; each counts as often as it was compiled."""
    counters = _compiler_counters()
    return int(sum(counters["graph_break"].values())) if counters else 0


def _compiler_counters() -> Any:
    """The compiler's counters; empty in a process that has not imported it."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    return module.counters if module is not None else {}
