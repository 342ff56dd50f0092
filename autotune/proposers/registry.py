"""The samplers by name. A module of this package lists its own in `SAMPLERS`: name -> how to make one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path

from autotune.errors import ConfigError
from autotune.proposers.base import Proposer
from autotune.proposers.cost_model import CostModel

MakeProposer = Callable[[CostModel, int], Proposer]  # from the cost model and a seed


def samplers() -> dict[str, MakeProposer]:
    """Every sampler by its name."""
    found: dict[str, MakeProposer] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        found |= getattr(importlib.import_module(f"autotune.proposers.{module.name}"), "SAMPLERS", {})
    return found


def sampler_names() -> tuple[str, ...]:
    """The names of all samplers."""
    return tuple(samplers())


def proposer_named(name: str, cost_model: CostModel, seed: int) -> Proposer:
    """A proposer for one search.

    Raises:
        ConfigError: there is no sampler of that name.
    """
    known = samplers()
    if name not in known:
        raise ConfigError(f"{name!r} is not a known sampler; expected one of {', '.join(known)}")
    return known[name](cost_model, seed)
