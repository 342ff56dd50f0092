"""What becomes of a job that the ranks of a world run together: the worst of what they found, with the rank named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.errors import tells_of_lost_peer
from autotune.records.outcome import Kind, Measurement

LOOK_EVERY_S = 0.2  # at how many collectives a rank has begun
_FAR = 2  # times the longest that a rank ever took: noise is less


def rank_file(channel: str, rank: int) -> str:
    """The file into which a rank above 0 writes what rank 0 sends through the channel."""
    return f"{channel}.{rank}"


def group_file(channel: str) -> str:
    """The file through which the ranks of a job find each other (torch's `FileStore`)."""
    return f"{channel}.group"


def question_file(channel: str) -> str:
    """The named pipe that is opened for the ranks of a job once they are asked where they are."""
    return f"{channel}.question"


def answer_file(channel: str, rank: int) -> str:
    """The file into which a rank writes its answer (`waited_for`)."""
    return f"{channel}.{rank}.answer"


@dataclass(frozen=True, kw_only=True)
class Part:
    """The ranks of a world that one machine runs, where others run the rest.

    Attributes:
        first: the first of them.
        world_size: ranks of all machines.
        address: of the machine, at which the others reach it.
    """

    first: int
    world_size: int
    address: str


@dataclass
class Pace:
    """How long a rank takes from one collective to the next. Who takes far longer than ever before hangs, or waits for who does.

    Attributes:
        begun: collectives that it had begun when it was last looked at; -1 before it is one of a group.
    """

    begun: int = -1
    _since_s: float = 0.0  # when it was first seen to have begun so many
    _longest_s: float = LOOK_EVERY_S

    def look(self, begun: int, now_s: float) -> None:
        """Take note of how many it has begun now. What it does before the first is no step."""
        if begun == self.begun:
            return
        if self.begun > 0:
            self._longest_s = max(self._longest_s, now_s - self._since_s)
        self.begun, self._since_s = begun, now_s

    def is_stuck(self, now_s: float) -> bool:
        """Whether it has begun none for far longer than its steps took so far."""
        return now_s - self._since_s > _FAR * self._longest_s


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
        return outcome.get("kind") == Kind.ERROR and tells_of_lost_peer(outcome["cause"])


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


def waited_for(answers: Mapping[str, dict[str, Any]], running: Sequence[int], first: int = 0) -> str:
    """`the others waited for rank 1 (net.py, line 34)`: the rank that hangs; empty where none is seen to.

    Who waits in a collective has begun one more than who has not come to it. A rank whose interpreter is held by other code
    gives no answer.

    Args:
        answers: of each rank by its number, in `collectives` how many it had begun, in `is_stuck` what its `Pace` says, and in
            `at` the place in the user's code.
        running: the ranks that had not ended.
        first: the rank in their world that 0 stands for.
    """
    begun = {rank: answers[str(rank)]["collectives"] for rank in running if str(rank) in answers}
    if not begun or not all(answer["is_stuck"] for answer in answers.values()):
        return ""
    if silent := [rank for rank in running if rank not in begun]:
        return f"the others waited for rank {first + silent[0]}, which gives no answer"
    last = min(begun, key=lambda rank: begun[rank])
    return (
        ""
        if begun[last] == max(begun.values())
        else f"the others waited for rank {first + last}{answers[str(last)]['at']}"
    )


def measured_together(measurements: Sequence[Measurement]) -> Measurement:
    """What the ranks measured, in their order: all have the slowest's time, and the one with the highest peak has its memory.

    The energy is that of all their devices.

    Args:
        measurements: of at least one rank.
    """
    first = max(measurements, key=lambda one: one.peak_bytes)
    disturbances = dict.fromkeys(words for one in measurements for words in one.disturbances)
    together = replace(
        first,
        growth_bytes_per_step=max(one.growth_bytes_per_step for one in measurements),
        long_run_growth_bytes=max(one.long_run_growth_bytes for one in measurements),
        num_alloc_retries=max(one.num_alloc_retries for one in measurements),
        num_ooms=max(one.num_ooms for one in measurements),
        contention=max(one.contention for one in measurements),
        disturbances=tuple(disturbances),
    )
    none_of = (one.no_energy for one in measurements if not one.counted)
    return together.with_energy((counted for one in measurements for counted in one.counted), next(none_of, ""))
