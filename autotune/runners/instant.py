"""A runner whose jobs end as soon as they are submitted: what recorded tables and closed forms have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from autotune.records.progress import Progress
from autotune.runners.in_flight import Host
from autotune.runners.jobs import Job
from autotune.runners.runner import Finished, Runner


class InstantRunner(Runner):
    """Looks results up, or computes them. Jobs wait in line to be collected, as many as there are slots."""

    def __init__(self) -> None:
        self._host = Host()
        self._finished: list[Finished] = []

    def __exit__(self, *exc_info: object) -> None:
        """Nothing runs on."""
        self._host, self._finished = Host(), []

    @abstractmethod
    def result_of(self, job: Job[Any]) -> Any:
        """The result of a job; an `Outcome` where it failed."""

    def submit(self, job: Job[Any], slot: str = "") -> int:
        """As `Runner.submit`; the job has ended when this returns. Raises what `result_of` raises."""
        stay = self._host.take({one.name: one.device.name for one in self.slots()}, job, slot)
        try:
            self._finished.append(Finished(ticket=stay.ticket, result=self.result_of(job)))
        except BaseException:
            self._host.leave(stay.ticket)
            raise
        return stay.ticket

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        """As `Runner.collect`; never waits."""
        if not self._finished:
            raise RuntimeError("nothing is in flight; submit a job first")
        finished = self._finished.pop(0)
        return replace(finished, result=self._host.leave(finished.ticket).place(finished.result))

    def progress(self, ticket: int) -> Progress | None:
        """As `Runner.progress`: nothing is streamed."""
        return Progress() if any(finished.ticket == ticket for finished in self._finished) else None

    def cancel(self, ticket: int) -> None:
        """As `Runner.cancel`; a job that has ended stays as it is."""
