"""Probes at once, each in a slot of its own. On one machine (`SlotsRunner`) every slot is a `LocalRunner` with its supervisor."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self

from autotune.devices.linux import cores
from autotune.devices.slots import Slots
from autotune.errors import DeviceError
from autotune.records.device import Slot
from autotune.records.inspection import Inspection
from autotune.records.outcome import Outcome, Progress
from autotune.runners.in_flight import Host
from autotune.runners.jobs import Job, R
from autotune.runners.local import LocalRunner
from autotune.runners.runner import Finished, ProbeFault, Runner, SlotLost, Stated
from autotune.task.source import TaskSource


class Member(Protocol):
    """One of several slots: a `LocalRunner`, or what passes jobs on to one elsewhere.

    Attributes:
        stated, notes: as of a `Runner`.
        slow_start: why each probe starts a new interpreter there; empty where none does. Known after entering.
    """

    stated: Stated
    notes: tuple[str, ...]
    slow_start: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None:
        """End what runs; also of one that was not entered."""

    def slots(self) -> tuple[Slot, ...]:
        """The slot alone, with its device as it is now. Raises DeviceError where that does not answer."""
        ...

    def submit(self, job: Job[Any]) -> int:
        """As `Runner.submit`; the ticket is unique among the members. Raises ProbeFault."""
        ...

    def collect(self, timeout_s: float | None) -> Finished | None:
        """As `Runner.collect`. Raises ProbeFault."""
        ...

    def progress(self, ticket: int) -> Progress | None:
        """As `Runner.progress`."""
        ...

    def found(self, ticket: int) -> Any:
        """As `Runner.found`."""
        ...

    def cancel(self, ticket: int) -> None:
        """As `Runner.cancel`."""

    def learn(self, inspection: Inspection) -> None:
        """Take over what later jobs need of an inspection that another member has made."""

    @property
    def news(self) -> tuple[list[int], float]:
        """Descriptors that can be read when there is news of the job in flight, and when `collect` has to be called at the latest."""
        ...

    @property
    def device_is_lost(self) -> bool:
        """Whether the driver says that the device has gone."""
        ...


class SeveralSlots(Runner):
    """Runs every kind of job, as many at once as there are slots.

    A slot whose device is lost, or whose machinery fails, is taken out (`SlotLost`), unless it is the last one. A subclass
    makes the members, and enters them by `_enter_all`.

    Args:
        source: how a process gets the task.
        logs: folder for what the user's code prints, a folder in it for each slot.
    """

    def __init__(self, source: TaskSource, logs: Path) -> None:
        self.task_name = source.name
        self._logs = logs.absolute()
        self._is_live = source.live is not None
        self._host = Host()
        self._where: dict[int, str] = {}  # ticket -> slot
        self._lost: dict[str, str] = {}  # slots that were taken out -> what that says
        self._members: dict[str, Member] = {}
        self._resources = contextlib.ExitStack()  # of a runner that was entered

    def _enter_all(self, at_once: int) -> None:
        """Enter the members, so many at once: each imports torch and the model for seconds."""
        members = [*self._members.values()]
        with contextlib.ExitStack() as stack:
            stack.callback(self._tidy)
            stack.callback(self._leave_all)
            with ThreadPoolExecutor(at_once) as pool:
                entering = [pool.submit(member.__enter__) for member in members]
            for each in entering:
                each.result()
            self._resources = stack.pop_all()
        self.stated, self.slow_start = members[0].stated, members[0].slow_start
        self.notes += members[0].notes

    def _leave_all(self) -> None:
        with contextlib.ExitStack() as stack:
            for member in self._members.values():
                stack.push(member.__exit__)

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()
        self._where.clear()

    def now_s(self) -> float:
        """Seconds that pass on this machine."""
        return time.monotonic()

    def slots(self) -> tuple[Slot, ...]:
        found: list[Slot] = []
        for member in self._members.values():
            with contextlib.suppress(DeviceError):  # `submit` finds out that it is lost
                found += member.slots()
        if not found:
            raise DeviceError(f"none of {', '.join(self._members)} answers any more; check nvidia-smi")
        return tuple(found)

    def submit(self, job: Job[Any], slot: str = "") -> int:
        taken = {*self._where.values()}
        if slot in self._lost:  # while a job ran that no slot was asked for
            raise SlotLost(self._lost[slot], slot)
        if slot and slot not in self._members:
            raise RuntimeError(f"there is no slot {slot}; there is {', '.join(self._members)}")
        if not (free := [name for name in self._members if name not in taken and slot in ("", name)]):
            raise RuntimeError(f"{f'the slot {slot} is' if slot else 'all slots are'} taken; collect a job first")
        for name in free:
            try:
                ticket = self._members[name].submit(job)
            except ProbeFault as fault:
                lost = self._lose(name, str(fault), fault)
                continue
            self._where[ticket] = name
            return ticket
        raise lost

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        if not self._where:
            raise RuntimeError("nothing is in flight; submit a job first")
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            for ticket, name in tuple(self._where.items()):
                if (finished := self._collect_from(name, ticket)) is not None:
                    return finished
            if time.monotonic() >= deadline:
                return None
            self._wait(deadline)

    def progress(self, ticket: int) -> Progress | None:
        name = self._where.get(ticket)
        return None if name is None else self._members[name].progress(ticket)

    def found(self, ticket: int) -> Any:
        name = self._where.get(ticket)
        return None if name is None else self._members[name].found(ticket)

    def cancel(self, ticket: int) -> None:
        if (name := self._where.get(ticket)) is not None:
            self._members[name].cancel(ticket)

    def _collect_from(self, name: str, ticket: int) -> Finished | None:
        """The job of a slot, if it has ended.

        Raises:
            SlotLost: the slot has died, and others are left.
            ProbeFault: the machinery of the last slot failed.
        """
        try:
            finished = self._members[name].collect(timeout_s=0.0)
        except ProbeFault as fault:
            del self._where[ticket]
            raise self._lose(name, str(fault), fault, ticket) from fault
        if finished is None:
            return None
        del self._where[ticket]
        result = finished.result
        if isinstance(result, Outcome) and not result.ok and len(self._members) > 1:
            if self._members[name].device_is_lost:
                raise self._lose(name, "the driver says that its device is gone", None, ticket)
            if result.device_fault:
                raise self._lose(name, result.cause, None, ticket)
        if isinstance(result, Inspection):
            for member in self._members.values():
                member.learn(result)
        return finished

    def _lose(self, name: str, why: str, fault: ProbeFault | None, *tickets: int) -> SlotLost:
        """Take a slot out. Raises the fault where it is the last one, which may serve again."""
        if len(self._members) == 1:
            assert fault is not None  # a lost device of the last slot is an outcome
            raise ProbeFault(str(fault), tickets or None)
        self._members.pop(name).__exit__(None, None, None)
        left = ", ".join(self._members)
        self._lost[name] = f"the slot {name} is taken out: {why}; the search goes on with {left}"
        return SlotLost(self._lost[name], name, tickets)

    def _run(self, job: Job[R], watch: Callable[[R], bool] | None) -> R | Outcome:
        while True:
            try:
                return super()._run(job, watch)
            except SlotLost as lost:  # then in another one
                self.notes += (str(lost),)

    def _wait(self, deadline: float) -> None:
        """Wait until there is news of a job, or a time is up."""
        with selectors.DefaultSelector() as selector:
            for name in self._where.values():
                descriptors, until_s = self._members[name].news
                deadline = min(deadline, until_s)
                for descriptor in descriptors:
                    selector.register(descriptor, selectors.EVENT_READ)
            selector.select(max(0.0, deadline - time.monotonic()))

    def _tidy(self) -> None:
        """Leave no folder without logs."""
        with contextlib.suppress(OSError):
            os.rmdir(self._logs)


class SlotsRunner(SeveralSlots):
    """Runs jobs in the slots of this machine.

    Args:
        source, logs: as of `SeveralSlots`.
        found: the slots.
        import_timeout_s, fork: as of `LocalRunner`.

    Raises:
        DeviceError: a device is not there, or this is not Linux.
    """

    def __init__(
        self,
        source: TaskSource,
        found: Slots,
        *,
        logs: Path,
        import_timeout_s: float = 180.0,
        fork: bool = True,
    ) -> None:
        super().__init__(source, logs)
        self.notes = found.notes
        num_cores = len(cores(frozenset[int]().union(*(slot.processors for slot in found.slots))))
        self.slowest_start = max(1.0, len(found.slots) / num_cores)  # processes that start at once share the cores
        self._local = {
            slot.name: LocalRunner(
                source,
                logs=self._logs / slot.name.replace(":", "-"),
                import_timeout_s=import_timeout_s,
                fork=fork,
                host=self._host,
                resources=slot,
            )
            for slot in found.slots
        }
        self._members.update(self._local)

    def __enter__(self) -> Self:
        self._enter_all(
            1 if self._is_live else len(self._members)
        )  # a task that lives here is pickled by one at a time
        return self

    def keep_compiled(self, folder: Path) -> None:
        for runner in self._local.values():
            runner.keep_compiled(folder)
