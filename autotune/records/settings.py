"""How a probe is to be run: plain frozen data that travels to the probe's process as JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autotune.records.formats import Record
from autotune.records.world import ALONE, World


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(Record):
    """One rule of warming up, timing and stopping for all probes of a study.

    Attributes:
        memory_limit_bytes: allocations beyond it fail; None for no limit.
        interval: timing stops when the 95 % interval of the throughput is within this share of it, to either side.
        max_timed_s: timing stops then, if the noise has not let it stop before.
        min_timed_s: timing goes on for so long.
        max_warmup_s: warming up stops then, once the minimum is done.
        slowest_samples_per_s: a config that is slower than this while it warms up is not worth timing: its warm-up steps
            are its measurement.
        front: peak bytes and samples/s of what was measured: timing stops when its interval says that one of these is
            faster in no more memory, and does not begin where even the fastest step of the warm-up is far from it.
        phases: a step is split by phase in the end, which takes one more.
        num_steps: exactly that many timed optimizer steps instead of the stopping rule (`verify`); 0 for the rule.
        seed: of torch, numpy and random, set before the model is built.
        timeout_s: the probe is killed then.
        world: the processes that train the config together.
    """

    memory_limit_bytes: int | None
    interval: float = 0.02
    max_timed_s: float = 3.0
    min_timed_s: float = 0.0
    max_warmup_s: float = 5.0
    slowest_samples_per_s: float = 0.0
    front: tuple[tuple[float, float], ...] = ()
    phases: bool = True
    num_steps: int = 0
    seed: int = 0
    timeout_s: float = 60.0
    world: World = ALONE

    def replace(self, **changes: Any) -> ProbeSettings:
        """The same settings with changes."""
        return replace(self, **changes)
