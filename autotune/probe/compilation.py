"""What torch's compiler has done in this process so far, by its own counters."""

from __future__ import annotations

import sys
from typing import Any


def num_graphs() -> int:
    """Graphs that were compiled, or taken from the cache."""
    return int(_counters()["stats"]["unique_graphs"]) if _counters() else 0


def num_graph_breaks() -> int:
    """Places where compiled code goes back to Python, as often as they were compiled."""
    return int(sum(_counters()["graph_break"].values())) if _counters() else 0


def _counters() -> Any:
    """Nothing in a process that has not imported the compiler."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    return module.counters if module is not None else {}
