"""What becomes of a job that the ranks of a world run together: the worst of what they found, with the rank named."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.records.outcome import Kind, Measurement

# as NCCL and gloo say it
_LOST_PEER = re.compile(r"remote process exited|[Cc]onnection (?:closed|reset) by peer|pair closure|Broken pipe")


def rank_file(channel: str, rank: int) -> str:
    """The file into which a rank above 0 writes what rank 0 sends through the channel."""
    return f"{channel}.{rank}"


def group_file(channel: str) -> str:
    """The file through which the ranks of a job find each other (torch's `FileStore`)."""
    return f"{channel}.group"


@dataclass(frozen=True, kw_only=True)
class Told:
    """The answer of a rank that came to one, and when, on the clock that all processes of the machine share."""

    rank: int
    answer: dict[str, Any]
    ended_s: float

    @property
    def lost_peer(self) -> bool:
        """Whether it failed because another rank was gone."""
        outcome = self.answer.get("outcome", {})
        return outcome.get("kind") == Kind.ERROR and _LOST_PEER.search(outcome["cause"]) is not None


def read_ranks(channel: str, size: int) -> list[Told]:
    """What the ranks above 0 have told."""
    told = []
    for rank in range(1, size):
        with open(rank_file(channel, rank), "rb") as file:
            lines = [json.loads(line) for line in file.read().split(b"\n")[:-1]]
        results = [line for line in lines if "result" in line]
        if results:
            told.append(Told(rank=rank, answer=results[-1]["result"], ended_s=results[-1]["ended_s"]))
    return told


def culprit(told: Sequence[Told], ended: dict[str, Any]) -> int | None:
    """The rank that ended the others; None where all ended well, or were ended together.

    A rank that died without a word comes before those that told of an error: they may have lost it. Of several errors the
    first counts, after those that tell of a lost peer, which has an error of its own.
    """
    spoke = {one.rank: one for one in told}
    by_itself = [rank for rank in range(len(ended["exit_codes"])) if rank not in ended["killed"]]
    if silent := [rank for rank in by_itself if rank not in spoke]:
        return silent[0]
    failed = [spoke[rank] for rank in by_itself if ended["exit_codes"][rank]]
    first = min([one for one in failed if not one.lost_peer] or failed, key=lambda one: one.ended_s, default=None)
    return None if first is None else first.rank


def measured_together(measurements: Sequence[Measurement]) -> Measurement:
    """What the ranks measured, in their order: all have the slowest's time, and the one with the highest peak has its memory.

    Args:
        measurements: of at least one rank.
    """
    first = max(measurements, key=lambda one: one.peak_bytes)
    disturbances = dict.fromkeys(words for one in measurements for words in one.disturbances)
    return replace(
        first,
        growth_bytes_per_step=max(one.growth_bytes_per_step for one in measurements),
        num_alloc_retries=max(one.num_alloc_retries for one in measurements),
        num_ooms=max(one.num_ooms for one in measurements),
        contention=max(one.contention for one in measurements),
        disturbances=tuple(disturbances),
    )
