"""`Runner`: what runs jobs (`runners/jobs.py`): inspections, probes, checks, traces. A search knows nothing else of where they run.

Local processes (`runners/local.py`) and recorded tables (`runners/replay.py`) are runners. A new one is a file of its own.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from autotune.errors import AutotuneError
from autotune.prediction.traces import Traces, plan_traces
from autotune.records.config import ALONE, Choice, Config, ProbeSettings, World
from autotune.records.device import Slot
from autotune.records.formats import Record
from autotune.records.outcome import Outcome, Progress
from autotune.runners.in_flight import Host
from autotune.runners.jobs import Job, ProbeJob, R, TraceJob
from autotune.task import Task
from autotune.task.source import TaskSource
from autotune.techniques import Techniques, find_techniques

TRACE_ATTEMPTS = 3  # jobs in one call of `trace`: one that dies on a group leaves the others to the next
WATCH_S = 1.0  # between two looks at what a trace has found


class ProbeFault(AutotuneError):
    """The machinery around jobs failed (a supervisor died, say): the machine is at fault, not the config.

    Args:
        tickets: of the jobs that are gone; None for every job in flight.
    """

    def __init__(self, message: str, tickets: tuple[int, ...] | None = None) -> None:
        super().__init__(message)
        self.tickets = tickets


class SlotLost(ProbeFault):
    """A slot cannot be used any more, and others can: what it ran has to run in one of them.

    Args:
        slot: its name, which is no longer among `Runner.slots()`.
        tickets: of the jobs that are gone.
    """

    def __init__(self, message: str, slot: str, tickets: tuple[int, ...] = ()) -> None:
        super().__init__(message, tickets)
        self.slot = slot


class NoSlotLeft(ProbeFault):
    """The last slot cannot be used any more, nor will there be another: nothing can be run."""


@dataclass(frozen=True, kw_only=True)
class Stated(Record):
    """What the task's author states, and how the task is named in a command.

    Attributes:
        model: names the task to a command, `model.py` or `model.py:task`; empty for a task that was built in Python.
        global_batch: samples per optimizer step; None where the author leaves it open.
        baseline: the config that the author runs today, as a partial dict; None when not stated.
        trained: what that config trains (`Techniques.trained`), under the names that the task has for it.
        made_by: the call that makes a task of what an integration tunes, as in `Task`; empty for any other.
    """

    model: str = ""
    global_batch: int | None = None
    baseline: Mapping[str, Any] | None = None
    trained: Mapping[str, Choice] = field(default_factory=dict)
    made_by: str = ""

    @classmethod
    def of(cls, task: Task, source: TaskSource) -> Self:
        """What is stated of a task that was loaded from a source."""
        return cls(
            model=replace(source, attribute=TaskSource.of(task).attribute).spec,
            global_batch=task.global_batch,
            baseline=None if task.baseline is None else dict(task.baseline),
            trained=find_techniques().trained_by(task, task.baseline or {}),
        )


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A job that ended.

    Attributes:
        ticket: as `submit` gave it.
        result: what its `Job.read` makes of the answer.
    """

    ticket: int
    result: Any


class Runner(ABC):
    """Runs jobs on one task, each in a slot. A context manager: leaving it leaves no process behind.

    It is entered first. Then for each job comes `submit`; `progress` and `found` a few times a second while it runs, and `cancel`
    where nothing can come of it any more; `collect` until it returns the job. `slots` and `now_s` may come at any time. One
    that has the jobs run on another machine, over a connection of its own:

        class Remote(Runner):
            def __init__(self, address: str, task_name: str) -> None:
                self._address, self.task_name = address, task_name

            def __enter__(self) -> Self:
                self._line, self._host = connect(self._address), Host()
                return self

            def slots(self) -> tuple[Slot, ...]:
                return tuple(map(Slot.from_dict, self._line.slots()))

            def submit(self, job: Job[Any], slot: str = "") -> int:
                stay = self._host.take({one.name: one.device.name for one in self.slots()}, job, slot)
                self._line.send({"ticket": stay.ticket, "device": stay.device, "job": job.name, "arguments": job.arguments()})
                return stay.ticket

            def progress(self, ticket: int) -> Progress | None:
                return self._line.progress.get(ticket)

            def collect(self, timeout_s: float | None = None) -> Finished | None:
                if (answer := self._line.receive(timeout_s)) is None:
                    return None
                stay = self._host.leave(answer["ticket"])
                return Finished(ticket=stay.ticket, result=stay.place(stay.job.read(answer)))

            def __exit__(self, *exc_info: object) -> None:
                self._line.close()  # which ends what runs there; and `cancel`, `now_s`

    Attributes:
        keeps_traces: whether its traces and calibrations hold for this machine, and may be kept for other searches.
        slowest_start: times the longest start so far that a probe's own may take: more where the user's code starts.
        task_name: of the task; it names the study, and is known before entering.
        version: tells its measurements from others of the task; a part of the study's name, unless the user gives one.
        stated: what the task's author states; known after entering.
        notes: what the user should know of this runner; known after entering.
        world: the processes that train a config together.
    """

    world: World = ALONE
    keeps_traces: bool = True
    slowest_start: float = 1.0
    version: str = ""
    task_name: str
    stated: Stated = Stated()
    notes: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *exc_info: object) -> None:
        """End every job in flight."""

    @property
    def techniques(self) -> Techniques:
        """The keys of a config beside the batch: the techniques that are installed, unless its task has switches of its own."""
        return find_techniques()

    @property
    def default_study(self) -> str:
        """Name of the study unless the user gives one."""
        return self.task_name

    @property
    def devices_here(self) -> Mapping[str, str]:
        """The options `device` and `devices` by which this machine runs its answer alike, besides what the search was asked.

        It is known once `slots` is. `devices` is 2x4 for four devices of each of two machines, which no machine has.
        """
        return {}

    def command(self, config: Config) -> str:
        """The command line that trains with a config; empty where `autotune.prepare` does."""
        return ""

    @abstractmethod
    def now_s(self) -> float:
        """The runner's own clock, in seconds from any start; budgets are spent on it."""

    @abstractmethod
    def slots(self) -> tuple[Slot, ...]:
        """Where jobs may run, one in each at a time, with the devices as they are now. There is one at least."""

    def new_slots(self) -> tuple[str, ...]:
        """The names of slots that have come since this was last asked."""
        return ()

    def keep_compiled(self, folder: Path) -> None:  # noqa: B027 (nothing, where nothing is compiled on this machine)
        """Keep what jobs compile in a folder, where later ones find it."""

    @abstractmethod
    def submit(self, job: Job[Any], slot: str = "") -> int:
        """Start a job. Returns its ticket. An outcome that comes of it says where it ran, and which jobs beside it.

        Args:
            slot: the name of the slot to run it in; empty for any that is free.

        Raises:
            RuntimeError: no such slot is free.
            SlotLost: the slot has died, and others are left, which are taken.
            ProbeFault: the machinery failed.
        """

    @abstractmethod
    def collect(self, timeout_s: float | None = None) -> Finished | None:
        """Wait for the next job to end; None when none did within `timeout_s`.

        Raises:
            RuntimeError: nothing is in flight.
            SlotLost: a slot has died, and others are left.
            NoSlotLeft: the last one has died.
            ProbeFault: the machinery failed; the job that it ran is gone.
        """

    @abstractmethod
    def progress(self, ticket: int) -> Progress | None:
        """How far a probe in flight has come; None for a ticket that is not in flight."""

    def found(self, ticket: int) -> Any:
        """What a job in flight has found so far; None where that is not known."""
        return None

    @abstractmethod
    def cancel(self, ticket: int) -> None:
        """End a job early. `collect` still returns it: a probe as a time-out, with the bound that it leaves."""

    def tracer(self) -> Runner | None:
        """Another runner of the task, to be entered, whose tracing disturbs no probe; None where it would."""
        return None

    def run(self, job: Job[R], watch: Callable[[R], bool] | None = None) -> R:
        """Run one job to its end, while nothing else is in flight.

        Args:
            watch: is told now and then what is found so far, as long as it returns true.

        Raises:
            JobFailed: it failed, and how is no result of such a job (of a probe it is).
            ProbeFault: the machinery failed.
        """
        found = self._run(job, watch)
        if isinstance(found, Outcome) and found.crowded and job.again_where_crowded:
            found = self._run(job, watch)
        if isinstance(found, Outcome) and (another := job.after(found)) is not None:
            return self.run(another, watch)
        return job.result(found)

    def probe(self, config: Config, settings: ProbeSettings) -> Outcome:
        """Train a few steps of a config. What the config or the user's code does is an outcome."""
        return self.run(ProbeJob(config=config, settings=settings))

    def in_all_that_is_free(self, run: Callable[[int], R], limit_bytes: int) -> R | None:
        """Run what a memory limit was too small for with all that is free as its limit; None where that is no more."""
        free_bytes = self.slots()[0].device.free_bytes
        return run(free_bytes) if free_bytes > limit_bytes else None

    def trace(
        self,
        configs: Iterable[Config],
        target: str,
        timeout_s: float,
        *,
        known: Traces | None = None,
        world: World = ALONE,
        slice_s: float = math.inf,
        watch: Callable[[Traces], bool] | None = None,
        only: Iterable[Config] | None = None,
    ) -> Traces:
        """Find the memory that configs need without running them; each group of techniques is traced once. Never raises.

        Args:
            target: the kind of device to predict for (`autotune.devices.targets`). No GPU is needed or touched.
            timeout_s: tracing is killed then, and the group that it was at has failed.
            known: traces that are there already and are not traced again.
            world: the processes that train a config together. They need not be there.
            slice_s: no group is begun after that, but for the first one.
            watch: is told now and then what is known so far, as long as it returns true.
            only: trace what these need, and nothing else of what the others do.

        Returns:
            `known` and what was found, in `failures` what cannot be traced. What is left when the time is up is in
            neither: another call goes on with it.
        """
        traces = known or Traces(target=target)
        plan = plan_traces(configs, self.techniques, world)
        if only is not None:
            plan = plan.needed_by(only, self.techniques)
        started = self.now_s()
        why = ""
        for attempt in range(TRACE_ATTEMPTS):
            left, spent_s = plan.without(traces), self.now_s() - started
            if not left.labels() or spent_s >= timeout_s or (attempt and spent_s >= slice_s):
                return traces
            job = TraceJob(plan=left, target=target, slice_s=slice_s - spent_s, timeout_s=timeout_s - spent_s)
            try:
                found = self.run(job, None if watch is None else partial(_tell, watch, traces))
            except ProbeFault as fault:
                why = str(fault)
                continue
            traces = traces.merged(found)
            why = next(reversed(list(found.failures.values())), "tracing ended early")
        left = plan.without(traces)
        if self.now_s() - started >= min(slice_s, timeout_s):
            return traces
        return traces.merged(Traces(target=target, failures=dict.fromkeys(left.labels(), why)))

    def _run(self, job: Job[R], watch: Callable[[R], bool] | None) -> R | Outcome:
        ticket = self.submit(job)
        try:
            while (finished := self.collect(None if watch is None else WATCH_S)) is None and watch is not None:
                if (found := self.found(ticket)) is not None and not watch(found):
                    watch = None
        except KeyboardInterrupt:
            self.cancel(ticket)
            with contextlib.suppress(ProbeFault):
                self.collect()  # frees the slot
            raise
        if finished is None or finished.ticket != ticket:
            raise RuntimeError("another job was in flight; collect it before running one alone")
        result: R | Outcome = finished.result
        return result


def _tell(watch: Callable[[Traces], bool], known: Traces, found: Traces) -> bool:
    return watch(known.merged(found))


class InstantRunner(Runner):
    """Looks results up, or computes them. Jobs are collected in the order in which they end on a clock of its own.

    Attributes:
        passed_s: seconds that have passed on that clock: until the last job that was collected has ended.
    """

    def __init__(self) -> None:
        self._host = Host()
        self._finished: list[tuple[float, Finished]] = []  # when each ends on the clock, and what comes of it
        self.passed_s = 0.0

    def __exit__(self, *exc_info: object) -> None:
        """Nothing runs on."""
        self._host, self._finished = Host(), []

    @abstractmethod
    def result_of(self, job: Job[Any]) -> Any:
        """The result of a job; an `Outcome` where it failed."""

    def takes_s(self, job: Job[Any], result: Any) -> float:
        """Seconds that a job takes on the runner's clock."""
        return 0.0

    def submit(self, job: Job[Any], slot: str = "") -> int:
        """As `Runner.submit`; the result is known when this returns. Raises what `result_of` raises."""
        stay = self._host.take({one.name: one.device.name for one in self.slots()}, job, slot)
        try:
            result = self.result_of(job)
        except BaseException:
            self._host.leave(stay.ticket)
            raise
        ends_s = self.passed_s + self.takes_s(job, result)
        self._finished.append((ends_s, Finished(ticket=stay.ticket, result=result)))
        return stay.ticket

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        """As `Runner.collect`; never waits."""
        if not self._finished:
            raise RuntimeError("nothing is in flight; submit a job first")
        first = min(self._finished, key=lambda one: one[0])  # of several the one that was submitted first
        self._finished.remove(first)
        ends_s, finished = first
        self.passed_s = max(self.passed_s, ends_s)
        return replace(finished, result=self._host.leave(finished.ticket).place(finished.result))

    def progress(self, ticket: int) -> Progress | None:
        """As `Runner.progress`: nothing is streamed."""
        return Progress() if any(finished.ticket == ticket for _, finished in self._finished) else None

    def cancel(self, ticket: int) -> None:
        """As `Runner.cancel`; a job that has ended stays as it is."""
