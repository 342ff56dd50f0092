"""A runner whose jobs end as soon as they are submitted: what recorded tables and closed forms have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from autotune.records.progress import Progress
from autotune.runners.jobs import Job
from autotune.runners.runner import Finished, Runner


class InstantRunner(Runner):
    """Looks results up, or computes them. Jobs wait in line to be collected, as many as there are slots."""

    def __init__(self) -> None:
        self._num_submitted = 0
        self._finished: list[Finished] = []

    def __exit__(self, *exc_info: object) -> None:
        """Nothing runs on."""
        self._finished.clear()

    @abstractmethod
    def result_of(self, job: Job[Any]) -> Any:
        """The result of a job; an `Outcome` where it failed."""

    def submit(self, job: Job[Any]) -> int:
        """As `Runner.submit`; the job has ended when this returns. Raises what `result_of` raises."""
        if len(self._finished) >= self.num_slots:
            raise RuntimeError(f"all {self.num_slots} slots are taken; collect a job first")
        self._num_submitted += 1
        self._finished.append(Finished(ticket=self._num_submitted, result=self.result_of(job)))
        return self._num_submitted

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        """As `Runner.collect`; never waits."""
        if not self._finished:
            raise RuntimeError("nothing is in flight; submit a job first")
        return self._finished.pop(0)

    def progress(self, ticket: int) -> Progress | None:
        """As `Runner.progress`: nothing is streamed."""
        return Progress() if any(finished.ticket == ticket for finished in self._finished) else None

    def cancel(self, ticket: int) -> None:
        """As `Runner.cancel`; a job that has ended stays as it is."""
