"""What ranks that hold copies of a model wait for each other, by the clocks that torch's `DistributedDataParallel` keeps itself.

They tell how long a rank waited for gradients after its own were there: the last rank for the wire alone, the others for that rank, too.
So no step of another kind is needed. DDP's broadcast of buffers (BatchNorm's) counts as computing, though, and shards have no such
clocks: their gathering and waiting is part of their forward and backward pass.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from autotune.lazy import torch
from autotune.records.formats import Record

NUM_COMPARED = 4  # steps of each rank, at least
SURE = 2.3  # standard deviations of Mann and Whitney's count: of four steps each, all must be apart, which is chance in one of 35
NUM_TOLD = 10  # first steps of a user's command of which each is looked at
_SELDOM = 100  # by itself torch tells of its first ten passes that wait for others, then of each hundredth
UNEQUAL = 0.05  # of what the first rank computes: waiting that is less matters little


@dataclass(frozen=True, kw_only=True)
class RankTimes(Record):
    """Seconds of one rank in one micro step, or in several where it waits for others in the last of them alone (`no_sync`).

    Attributes:
        forward_s, backward_s: it computed, the loss with the forward pass, from one wait to the next.
        exposed_s: it waited for gradients after its own were there: for other ranks, and for the wire.
    """

    forward_s: float
    backward_s: float
    exposed_s: float


def find_copies() -> Any:
    """What this process trains its copy of a model by; None where there is no other copy."""
    kind = torch.nn.parallel.DistributedDataParallel
    return next((one for one in gc.get_objects() if issubclass(type(one), kind)), None)


def tell_of_each_pass(copies: Any, *, each: bool = True) -> None:
    """Let torch tell of each pass that waits for others, or of few again: to tell, it waits for the device."""
    copies._set_ddp_runtime_logging_sample_rate(1 if each else _SELDOM)


def last_times(copies: Any, num_micro_steps: int | None = None) -> RankTimes | None:
    """Of the last wait but one: torch tells of a pass when the next one begins. None where it tells nothing.

    Args:
        num_micro_steps: taken so far; None where others are waited for in each. Where that is not so, torch's clocks tell of the
            last one before a wait, and each of the others is taken to be like it.
    """
    told = copies._get_ddp_logging_data()
    if "backward_comm_time" not in told:
        return None
    num_waits = told["iteration"] + 1
    num_micro = 1 if num_micro_steps is None else max(1, round(num_micro_steps / num_waits))
    exposed = told["backward_comm_time"] - told["backward_compute_comm_overlap_time"]
    found = (num_micro * told["forward_compute_time"], num_micro * told["backward_compute_time"], max(0, exposed))
    forward_s, backward_s, exposed_s = (nanoseconds / 1e9 for nanoseconds in found)
    return RankTimes(forward_s=forward_s, backward_s=backward_s, exposed_s=exposed_s)


@dataclass(frozen=True)
class Ranks:
    """The times of all ranks in the same steps, in the ranks' order; at least one of each."""

    times: Sequence[Sequence[RankTimes]]

    @classmethod
    def of(cls, times: Sequence[Sequence[RankTimes]]) -> Self | None:
        """None where nothing is known of one of them."""
        return cls(times) if len(times) > 1 and all(times) else None

    @property
    def waits_s(self) -> tuple[float, ...]:
        """What each waits for gradients in a micro step."""
        return tuple(median(one.exposed_s for one in times) for times in self.times)

    @property
    def slow_rank(self) -> int | None:
        """The last one, where another waits for it by more than the noise; None where there is none, or too little is known."""
        waits_s = self.waits_s
        last, first = self.times[waits_s.index(min(waits_s))], self._first
        computed_s = median(one.forward_s + one.backward_s for one in first)
        if min(map(len, self.times)) < NUM_COMPARED or max(waits_s) - min(waits_s) < UNEQUAL * computed_s:
            return None
        return waits_s.index(min(waits_s)) if _are_apart(last, first) else None

    def phases_s(self, accumulation_steps: int) -> dict[str, float]:
        """Seconds of an optimizer step as the first rank sees it: it computes, waits for the last, and with it for the wire.

        `imbalance` is what it waits for the last rank, and `communication` what that one, for which all others have waited, still
        waits for gradients, which go over the wire in the last micro step alone.
        """
        waits_s = self.waits_s
        return {
            "forward": accumulation_steps * median(one.forward_s for one in self._first),
            "backward": accumulation_steps * median(one.backward_s for one in self._first),
            "imbalance": accumulation_steps * (max(waits_s) - min(waits_s)),
            "communication": min(waits_s),
        }

    @property
    def _first(self) -> Sequence[RankTimes]:
        return self.times[self.waits_s.index(max(self.waits_s))]


def _are_apart(last: Sequence[RankTimes], first: Sequence[RankTimes]) -> bool:
    """Whether one rank waits less than another by more than the noise.

    The test is Mann and Whitney's (1947): it counts the pairs of steps in which the first one waits no longer. A few steps that other
    work on the machine disturbed do not hide a rank that is slow in all others.
    """
    wrong = sum(one.exposed_s >= other.exposed_s for one in last for other in first)
    num_pairs = len(last) * len(first)
    deviation = math.sqrt(num_pairs * (len(last) + len(first) + 1) / 12)
    return wrong <= num_pairs / 2 - SURE * deviation
