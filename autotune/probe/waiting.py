"""What ranks that hold copies of a model wait for each other, by the clocks that torch's `DistributedDataParallel` keeps itself.

They stop where the last gradient is there, so what a rank computes is told from what it waits for, without a step of another kind. DDP
waits for the broadcast of buffers (BatchNorm's) within what it tells as computing, though, and shards have no such clocks: their
gathering and waiting is part of their forward and backward pass.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

from autotune.lazy import torch
from autotune.records.formats import Record

NUM_COMPARED = 4  # steps of each rank: of two that are equal, all of one are slower by chance in one of 35 comparisons
UNEQUAL = 1.05  # times another rank's computing, from which on the difference matters


@dataclass(frozen=True, kw_only=True)
class RankTimes(Record):
    """Seconds of one rank in one micro step.

    Attributes:
        forward_s, backward_s: it computed, the loss with the forward pass.
        exposed_s: it waited for gradients after its own were there: for other ranks, and for the wire.
    """

    forward_s: float
    backward_s: float
    exposed_s: float

    @property
    def own_s(self) -> float:
        """It computed."""
        return self.forward_s + self.backward_s


def find_copies() -> Any:
    """What this process trains its copy of a model by; None where there is no other copy."""
    kind = torch.nn.parallel.DistributedDataParallel
    return next((one for one in gc.get_objects() if issubclass(type(one), kind)), None)


def last_times(copies: Any) -> RankTimes | None:
    """Of the last step but one: torch tells of a step when the next one begins. None where it tells nothing.

    It tells of the first ten steps, and then of each 100th unless it is asked for more.
    """
    told = copies._get_ddp_logging_data()
    if "backward_comm_time" not in told:
        return None
    exposed = told["backward_comm_time"] - told["backward_compute_comm_overlap_time"]
    found = (told["forward_compute_time"], told["backward_compute_time"], max(0, exposed))
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
    def own_s(self) -> tuple[float, ...]:
        """What each computes in a micro step."""
        return tuple(median(one.own_s for one in times) for times in self.times)

    @property
    def slow_rank(self) -> int | None:
        """The one that computes longer than another by more than the noise; None where there is none, or too little is known."""
        own_s = self.own_s
        slow, fast = own_s.index(max(own_s)), own_s.index(min(own_s))
        if min(map(len, self.times)) < NUM_COMPARED or own_s[slow] < UNEQUAL * own_s[fast]:
            return None
        apart = min(one.own_s for one in self.times[slow]) > max(one.own_s for one in self.times[fast])
        return slow if apart else None

    def phases_s(self, accumulation_steps: int) -> dict[str, float]:
        """Seconds of an optimizer step as the fastest rank sees it: it computes, waits for the slowest, and with it for the wire.

        `imbalance` is what the fastest rank waits for the slowest, and `communication` what the slowest, for which the others have
        waited, still waits for its gradients. Gradients go over the wire in the last micro step alone.
        """
        own_s = self.own_s
        fast, slow = self.times[own_s.index(min(own_s))], self.times[own_s.index(max(own_s))]
        return {
            "forward": accumulation_steps * median(one.forward_s for one in fast),
            "backward": accumulation_steps * median(one.backward_s for one in fast),
            "imbalance": accumulation_steps * (max(own_s) - min(own_s)),
            "communication": median(one.exposed_s for one in slow),
        }
