"""Proposers: each takes the history of trials and returns the config to probe next.

The samplers are found by being there: a module of this package lists its own in `SAMPLERS`, name -> how to make one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from autotune.errors import ConfigError
from autotune.proposers.base import Proposer
from autotune.proposers.cost_model import CostModel

MakeProposer = Callable[[CostModel, int], Proposer]  # from the cost model and a seed


def samplers() -> dict[str, MakeProposer]:
    """Every sampler by its name."""
    found: dict[str, MakeProposer] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        found |= getattr(importlib.import_module(module.name), "SAMPLERS", {})
    return found


def sampler_named(name: str) -> MakeProposer:
    """How to make the proposer of one search.

    Raises:
        ConfigError: there is no sampler of that name.
    """
    known = samplers()
    if name not in known:
        raise ConfigError(f"sampler: {name!r} is not known; expected one of {', '.join(known)}")
    return known[name]
