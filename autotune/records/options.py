"""What the user asks of a search, as plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OBJECTIVES = ("throughput", "memory", "balanced")
COST_MODEL = "cost-model"  # the sampler that is this package's own
SAMPLERS = (COST_MODEL, "gp", "tpe", "random", "grid")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The search's options; the command line's flags have the same names.

    Attributes:
        objective: `throughput`; `memory` (least memory at no less than the baseline's speed); `balanced`
            (throughput over the square root of memory: a halving of memory is worth 1.4 times the speed).
        memory_limit_bytes: for the training process; None takes what the device has free.
        headroom: share of the limit that the answer leaves free.
        budget_s: for the whole search, play-off included.
        num_trials: at most that many probes before the play-off; None leaves it to the budget.
        fix: technique -> the one choice to use. include: techniques whose optional choices are searched too.
            exclude: techniques that stay as in the baseline.
        probe_timeout_s: None takes a multiple of the baseline's time, at least 20 s.
        study, storage: name and storage URL; None for `studies/<task>.db`.
    """

    device: str = "auto"
    objective: str = "throughput"
    memory_limit_bytes: int | None = None
    headroom: float = 0.05
    global_batch: int | None = None
    budget_s: float = 300.0
    num_trials: int | None = None
    fix: Mapping[str, Any] = field(default_factory=dict)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    sampler: str = COST_MODEL
    seed: int = 0
    probe_timeout_s: float | None = None
    study: str | None = None
    storage: str | None = None
