"""A slot on several machines: a world over their network. Each machine runs its ranks, and what comes of a job is put together."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self

from autotune.errors import tells_of_lost_peer
from autotune.records.config import World
from autotune.records.device import Slot
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Measurement, Outcome, Progress
from autotune.runners.in_flight import Host, Stay
from autotune.runners.jobs import Job
from autotune.runners.local import runs_together
from autotune.runners.ranks import measured_together
from autotune.runners.remote import RemoteMember
from autotune.runners.runner import Finished, ProbeFault, Stated

LAST_WORDS_S = 1.0  # of the other machines, once a rank of one has failed


class SpreadMember:
    """The parts of a slot on several machines, as one of several slots.

    Where a part fails, the others are ended: their ranks would wait for it. Where a part's machine is lost, so is the slot.

    Args:
        name: of the slot, with all its machines.
        parts: the one with rank 0 first, each with a host of its own.
        host: where the jobs of the search are kept.
        address: of the first part's machine, at which the others reach it.
    """

    def __init__(self, name: str, parts: Sequence[RemoteMember], world: World, *, host: Host, address: str) -> None:
        self.name = name
        self.stated, self.slow_start = Stated(), ""
        self.notes: tuple[str, ...] = ()
        self._parts, self._world, self._host, self._address = parts, world, host, address
        self._stay: Stay | None = None
        self._tickets: dict[int, int] = {}  # part -> its ticket, while it runs
        self._results: dict[int, Any] = {}  # part -> what came of it, in the order in which they ended
        self._ended: set[int] = set()  # parts that were ended because another failed
        self._end_s = math.inf  # when those that run are ended

    def __enter__(self) -> Self:
        with ThreadPoolExecutor(len(self._parts)) as pool:
            entering = [pool.submit(part.__enter__) for part in self._parts]
        for each in entering:
            each.result()
        first = self._parts[0]
        self.stated, self.slow_start, self.notes = first.stated, first.slow_start, first.notes
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End what runs."""
        with ThreadPoolExecutor(len(self._parts)) as pool:
            for part in self._parts:
                pool.submit(part.__exit__, None, None, None)
        self._forget()

    def slots(self) -> tuple[Slot, ...]:
        found = [slot.device for part in self._parts for slot in part.slots()]
        device = replace(found[0], free_bytes=min(each.free_bytes for each in found))
        return (Slot(name=self.name, device=device),)

    def submit(self, job: Job[Any]) -> int:
        [slot] = self.slots()
        together = runs_together(job, self._world)
        self._stay = stay = self._host.take({self.name: slot.device.name}, job)
        self._results, self._ended, self._end_s = {}, set(), math.inf
        try:
            meeting = self._parts[0].meet(self._address) if together else ""
            for number, part in enumerate(self._parts if together else self._parts[:1]):
                self._tickets[number] = part.submit(job, meeting)
        except BaseException:
            self._forget()
            raise
        return stay.ticket

    def collect(self, timeout_s: float | None) -> Finished | None:
        """As `Runner.collect`; never waits: `news` says when to come again."""
        stay = self._stay
        assert stay is not None, "nothing is in flight; submit a job first"
        for number in tuple(self._tickets):
            try:
                finished = self._parts[number].collect(timeout_s=0.0)
            except ProbeFault:
                self._forget()
                raise
            if finished is not None:
                del self._tickets[number]
                self._results[number] = finished.result
                if isinstance(finished.result, Outcome) and not finished.result.ok:
                    self._end_s = min(self._end_s, time.monotonic() + LAST_WORDS_S)
        if time.monotonic() >= self._end_s:
            for number in self._tickets.keys() - self._ended:
                self._ended.add(number)
                self._parts[number].cancel(self._tickets[number])
        if self._tickets:
            return None
        result = put_together({number: one for number, one in self._results.items() if number not in self._ended})
        self._forget()
        return Finished(ticket=stay.ticket, result=stay.place(result))

    def progress(self, ticket: int) -> Progress | None:
        return self._parts[0].progress(self._tickets[0]) if self._has_first(ticket) else None

    def found(self, ticket: int) -> Any:
        return self._parts[0].found(self._tickets[0]) if self._has_first(ticket) else None

    def cancel(self, ticket: int) -> None:
        if self._stay is not None and self._stay.ticket == ticket:
            for number, own in self._tickets.items():
                self._parts[number].cancel(own)

    def learn(self, inspection: Inspection) -> None:
        for part in self._parts:
            part.learn(inspection)

    @property
    def news(self) -> tuple[list[int], float]:
        """As `Member.news`."""
        found = [self._parts[number].news for number in self._tickets]
        end_s = self._end_s if self._tickets.keys() - self._ended else math.inf
        return [one for descriptors, _ in found for one in descriptors], min(
            [end_s, *(until_s for _, until_s in found)]
        )

    @property
    def device_is_lost(self) -> bool:
        """As `Member.device_is_lost`."""
        return any(part.device_is_lost for part in self._parts)

    def _has_first(self, ticket: int) -> bool:
        """Whether a job runs, and rank 0 with it, which tells how far it has come."""
        return self._stay is not None and self._stay.ticket == ticket and 0 in self._tickets

    def _forget(self) -> None:
        """Free the slot."""
        if self._stay is not None:
            self._host.leave(self._stay.ticket)
        self._stay = None
        self._tickets.clear()


def put_together(results: Mapping[int, Any]) -> Any:
    """What came of a job whose ranks several machines ran: the failure that ended the others, or what rank 0 found.

    Args:
        results: of each part, in the order in which they ended; a part that was ended because another failed is not among them.
    """
    failed = [one for one in results.values() if isinstance(one, Outcome) and not one.ok]
    if failed:
        return next((one for one in failed if not _lost_peer(one)), failed[0])
    first = results[0]
    if not isinstance(first, Outcome):
        return first
    measured = [(number, results[number].measurement) for number in sorted(results)]
    own = [_with_own_counters(one, number) for number, one in measured if one is not None]
    return replace(first, measurement=measured_together(own))


def _with_own_counters(measured: Measurement, number: int) -> Measurement:
    """What a part measured, its counters named apart from those of other machines, which may have the same names."""
    named = (replace(one, counter=f"machine {number}: {one.counter}") for one in measured.counted)
    return replace(measured, counted=tuple(named))


def _lost_peer(outcome: Outcome) -> bool:
    return outcome.kind is Kind.ERROR and tells_of_lost_peer(outcome.cause)
