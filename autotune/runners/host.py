"""Which jobs are in flight on a host, in which slot each of them is, and which ran beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.records.outcome import Outcome
from autotune.runners.jobs import Job


@dataclass
class Stay:
    """A job in a slot, and the labels of the jobs that were in flight beside it so far."""

    ticket: int
    job: Job[Any]
    slot: str
    device: str
    beside: list[str] = field(default_factory=list)

    def place(self, result: Any) -> Any:
        """The job's result, with where it ran where that is an outcome."""
        if not isinstance(result, Outcome):
            return result
        beside, world = tuple(self.beside), self.job.world
        return replace(result, slot=self.slot, device=self.device, beside=beside, world=world)


class Host:
    """Gives jobs their slots and tickets. Runners that share a machine share one of these: their jobs run beside each other."""

    def __init__(self) -> None:
        self._stays: dict[int, Stay] = {}
        self._num_jobs = 0

    def take(self, slots: Mapping[str, str], job: Job[Any], wanted: str = "") -> Stay:
        """Give a job a free slot until it leaves.

        Args:
            slots: name of each slot -> name of its device.
            wanted: the slot that it must be; empty for any.

        Raises:
            RuntimeError: it, or each of them, is taken.
        """
        taken = {stay.slot for stay in self._stays.values()}
        free = [name for name in slots if name not in taken and wanted in ("", name)]
        if not free:
            which = (
                f"the slot {wanted} is"
                if wanted
                else f"all {len(slots)} slots are"
                if len(slots) > 1
                else "the slot is"
            )
            raise RuntimeError(f"{which} taken; collect a job first")
        self._num_jobs += 1
        stay = Stay(self._num_jobs, job, free[0], slots[free[0]])
        for other in self._stays.values():
            stay.beside.append(f"{other.job.label} on {other.slot}")
            other.beside.append(f"{job.label} on {stay.slot}")
        self._stays[stay.ticket] = stay
        return stay

    def leave(self, ticket: int) -> Stay:
        """Free a job's slot, once it has ended."""
        return self._stays.pop(ticket)
