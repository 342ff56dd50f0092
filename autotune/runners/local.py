"""`LocalRunner`: every job in a process of its own on this machine, behind a supervisor that starts, watches and cleans up."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import sys
import tempfile
import time
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import psutil

from autotune.devices import device_named, name_devices, open_device, require_linux
from autotune.devices.linux import cores
from autotune.devices.slots import SlotResources
from autotune.errors import TaskError
from autotune.records.config import Config, World
from autotune.records.device import Slot
from autotune.records.inspection import Inspection
from autotune.records.options import ONE_DEVICE
from autotune.records.outcome import Kind, Outcome, Progress
from autotune.runners.compile_cache import CompileCache
from autotune.runners.connection import Connection
from autotune.runners.in_flight import Host, InFlight, Stay
from autotune.runners.jobs import CheckJob, ConfigJob, Job, MeasureJob, TracingJob
from autotune.runners.logs import Logs
from autotune.runners.ranks import Part
from autotune.runners.runner import Finished, ProbeFault, Runner, Stated
from autotune.runners.start import held_ahead_bytes
from autotune.task.source import TaskSource
from autotune.units import format_bytes, format_seconds

HELD_SHARE = 0.1  # of what is free: less than that lets in no larger batch
PATIENCE_S = 15.0  # beyond a job's time-out, until the supervisor must have answered


def runs_together(job: Job[Any], world: World) -> bool:
    """Whether all ranks of a world run a job together; else the first one does, alone."""
    return isinstance(job, (MeasureJob, CheckJob)) and job.world.size == world.size


class OneSlotRunner(Runner):
    """Runs jobs on one device of this machine, one at a time.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        devices: those that train a config together, as `name_devices` takes them.
        logs: folder for what the user's code prints.
        host: where the jobs of this machine are kept, if another runner has some as well.
        resources: of the slot, where it is one of several: its device counts, and not `device`.

    Raises:
        DeviceError: there is no such device.
    """

    def __init__(
        self,
        device: str,
        logs: Path,
        host: Host | None = None,
        devices: str = ONE_DEVICE,
        resources: SlotResources | None = None,
    ) -> None:
        self._own = resources
        device = device if resources is None else resources.device
        self._devices = name_devices(devices, device)
        self.world = World(size=len(self._devices))
        self._device = open_device(self._devices[0])
        self._opened = (self._device, *map(device_named, self._devices[1:]))  # kept: each knows its level of rest
        self._logs = logs.absolute()
        self._host = host or Host()
        self._running: InFlight | None = None
        self._resources = contextlib.ExitStack()  # of a runner that was entered

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()
        if self._running is not None:
            self._forget(self._running)

    def now_s(self) -> float:
        """Seconds that pass on this machine."""
        return time.monotonic()

    def slots(self) -> tuple[Slot, ...]:
        """One, on the device or the group of them, with what is free now for each process."""
        info = self._device.info()
        if not self._device.capabilities.own_memory:
            info = replace(info, free_bytes=(info.free_bytes + held_ahead_bytes()) // len(self._devices))
        elif len(self._devices) > 1:
            info = replace(info, free_bytes=min(device.info().free_bytes for device in self._opened))
        if self._own is not None and not self._device.capabilities.own_memory:
            num_threads = min(info.num_threads, len(cores(self._own.processors)))
            shared = (
                f"the counters of energy count the whole machine, and {self._slot} is a part of it; leave --slots out"
            )
            info = replace(
                info,
                free_bytes=info.free_bytes // self._own.num_sharing,
                num_threads=num_threads,
                no_energy=info.no_energy or shared,
            )
        return (Slot(name=self._slot, device=info),)

    @property
    def device_is_lost(self) -> bool:
        """Whether the driver says that the device has gone since the runner opened it."""
        return self._device.is_lost()

    @property
    def _slot(self) -> str:
        if self._own is not None:
            return self._own.name
        return self._device.name if len(self._devices) == 1 else ",".join(self._devices)

    def submit(self, job: Job[Any], slot: str = "") -> int:
        """As `Runner.submit`: one job at a time."""
        stay = self._host.take({self._slot: self._device.name}, job, slot)
        try:
            self._running = self._start(stay)
        except BaseException:
            self._host.leave(stay.ticket)
            raise
        return stay.ticket

    @abstractmethod
    def _start(self, stay: Stay) -> InFlight:
        """Start the process of a job. Raises ProbeFault."""

    def progress(self, ticket: int) -> Progress | None:
        if (running := self._in_flight(ticket)) is None:
            return None
        running.read()
        return running.progress

    def found(self, ticket: int) -> Any:
        running = self._in_flight(ticket)
        return None if running is None else running.found()

    def _forget(self, running: InFlight) -> None:
        """Free the slot of a job that has ended."""
        running.close()
        self._host.leave(running.stay.ticket)
        self._running = None

    def _in_flight(self, ticket: int) -> InFlight | None:
        return self._running if self._running is not None and self._running.stay.ticket == ticket else None

    def _arguments(self, job: Job[Any]) -> dict[str, Any]:
        """What the worker's function for this job takes."""
        device = ",".join(self._devices) if self._num_ranks(job) > 1 else self._device.name
        return {"device": device, **job.arguments()}

    def _num_ranks(self, job: Job[Any]) -> int:
        """Processes that run a job here."""
        return len(self._devices) if runs_together(job, self.world) else 1


class LocalRunner(OneSlotRunner):
    """Runs every kind of job, behind a supervisor.

    Args:
        source: how a process gets the task; None for a subclass whose jobs need none.
        device, devices, logs, host, resources: as of `OneSlotRunner`; there is one log a job.
        import_timeout_s: for importing torch and the user's module.
        fork: False starts a new interpreter for each job from the outset.
        folder: for what is kept while it runs. It is deleted where this process dies; None for one that always is.
        part: the devices are those of this machine for a world that others train with it.

    Raises:
        DeviceError: there is no such device, or this is not Linux.
    """

    def __init__(
        self,
        source: TaskSource | None,
        *,
        logs: Path,
        device: str = "auto",
        devices: str = ONE_DEVICE,
        import_timeout_s: float = 180.0,
        fork: bool = True,
        host: Host | None = None,
        resources: SlotResources | None = None,
        folder: Path | None = None,
        part: Part | None = None,
    ) -> None:
        require_linux()
        super().__init__(device, logs, host, devices, resources)
        self._part = part
        self._meeting = ""
        if part is not None:
            self.world = World(size=part.world_size)
        if source is not None:
            self.task_name = source.name
        self._source = source
        self._log_files = Logs(self._logs)
        self._folder = folder
        self._import_timeout_s = import_timeout_s
        self._fork = fork
        self.slow_start = ""  # why each probe starts a new interpreter, where that is so; known after entering
        self._compiled: CompileCache | None = None  # torch has one of its own
        # of jobs by the cache's folder and their name, for which everything is compiled there
        self._compile_cold_s: dict[tuple[Path | None, str, Config], float] = {}
        self._widest: tuple[int, ...] | None = None  # of the dataset's samples; known after an inspection
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = self._folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-"))
            self._channel = os.path.join(folder, "channel")
            os.mkfifo(self._channel, 0o600)
            if is_live := self._source is not None and self._source.live is not None:
                self._source = self._source.hand_over(Path(folder))
            self._log_files.open()
            stack.callback(self._log_files.tidy)
            stack.callback(self._disconnect)
            try:
                hello = self._connect().hello
            except TaskError:  # which tells what was printed
                self._log_files.imports.unlink(missing_ok=True)
                raise
            self._resources = stack.pop_all()
        if self._source is not None:
            self.stated = Stated.from_dict(hello["stated"])
        if hello["no_fork"]:
            self.slow_start = f"every probe starts a new interpreter: {hello['no_fork']}"
            self.notes += (self.slow_start,)
        if is_live and (held := self._held()):
            self.notes += (f"this process holds {held} itself, which probes do without; free what is not needed",)
        return self

    def tracer(self) -> Runner | None:
        """As `Runner.tracer`: probes on a GPU leave the processor to others."""
        if not self._device.capabilities.own_processors:
            return None
        logs = self._logs / "tracing"
        return LocalRunner(
            self._source,
            logs=logs,
            device="cpu",
            import_timeout_s=self._import_timeout_s,
            fork=self._fork,
            host=self._host,
        )

    def keep_compiled(self, folder: Path) -> None:
        self._compiled = CompileCache(folder)
        if not folder.exists():  # what was compiled there has been deleted
            gone, known = self._compiled.folder, self._compile_cold_s
            self._compile_cold_s = {compiled: cold_s for compiled, cold_s in known.items() if compiled[0] != gone}

    def meet(self, meeting: str) -> None:
        """Say at which `HOST:PORT` the ranks of the next job find those of other machines."""
        self._meeting = meeting

    def _start(self, stay: Stay) -> InFlight:
        job = stay.job
        log = self._log_files.begin(job.name)
        compiles = (
            self._source is not None  # what a command compiles is its own business
            and isinstance(job, ConfigJob)
            and self.techniques.setup_s(job.config) > 0
        )
        cache = self._compiled if compiles else None
        is_first = isinstance(job, MeasureJob) and self._in_cache(job, cache) not in self._compile_cold_s
        view = None if cache is None else cache.open()
        num_ranks = self._num_ranks(job)
        part = self._part if runs_together(job, self.world) else None
        request = {
            "ticket": stay.ticket,
            "jobs": [*(["fill_cache"] if compiles and is_first else []), job.name],
            "compiled": str(view or ""),
            "arguments": self._arguments(job),
            "widest": self._widest,
            "channel": self._channel,
            "log": str(log),
            "timeout_s": job.timeout_s,
            "num_ranks": num_ranks,
            "first_rank": 0 if part is None else part.first,
            "meeting": "" if part is None else self._meeting,
        }
        if not isinstance(job, TracingJob):
            self._settle()
        connection = self._connect()  # a new supervisor imports for seconds, which are not the job's
        # opened for writing, too: else reading finds an end of file between two messages
        channel = os.open(self._channel, os.O_RDWR | os.O_NONBLOCK)
        own_memory = self._device.capabilities.own_memory
        running = InFlight(
            stay,
            log,
            channel,
            on_gpu=own_memory,
            cache=cache,
            compiled=view,
            path=self._channel,
            num_ranks=num_ranks,
            part=part,
        )
        try:
            connection.send(request)
        except BaseException:
            running.close()
            self._close_view(running)
            self._disconnect()
            raise
        return running

    def _settle(self) -> None:
        """Wait until the memory of ended processes is free again, on every device."""
        for device in self._opened:
            device.settle()

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        running = self._running
        if running is None or self._connection is None:
            raise RuntimeError("nothing is in flight; submit a job first")
        ended = None
        try:
            ended = self._wait(running, self._connection, timeout_s)
            if ended is None:
                return None
            result = running.result(ended)
        except ProbeFault as fault:
            self._disconnect()
            result = running.failed(Outcome(kind=Kind.CRASHED, cause=str(fault)))
            if isinstance(result, Outcome):
                self._forget(running)
                raise
        running.ended_well = ended is not None and ended["exit_code"] >= 0
        if running.ended_well and isinstance(running.job, MeasureJob):
            found = result.measurement
            compiled = self._in_cache(running.job, running.cache)
            cold_s = self._compile_cold_s.setdefault(compiled, found.compile_cold_s if found else 0.0)
            if found is not None:
                result = replace(result, measurement=replace(found, compile_cold_s=cold_s))
        self._forget(running)
        if isinstance(result, Inspection):
            self.learn(result)
        return Finished(ticket=running.stay.ticket, result=result)

    def learn(self, inspection: Inspection) -> None:
        """Take over what later jobs need of an inspection, which another runner of the task may have made."""
        self._widest = inspection.facts.widest or None

    @property
    def news(self) -> tuple[list[int], float]:
        """Descriptors that can be read when there is news of the job in flight, and when `collect` has to be called at the latest.

        The time is on `now_s`.
        """
        if self._running is None or self._connection is None:
            return [], math.inf
        return [self._running.channel, self._connection.fileno()], self._must_end_s(self._running)

    def cancel(self, ticket: int) -> None:
        if self._in_flight(ticket) is not None and self._connection is not None:
            with contextlib.suppress(ProbeFault):  # `collect` finds out, too
                self._connection.send({"cancel": ticket})

    def _connect(self) -> Connection:
        """The supervisor; another one where the last has died."""
        if self._connection is None:
            self._connection = Connection(
                self._source,
                log=self._log_files.imports,
                folder=os.path.dirname(self._channel),
                import_timeout_s=self._import_timeout_s,
                fork=self._fork,
                num_ranks=self.world.size,
                processors=None if self._own is None else self._own.processors,
            )
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.stop()
        self._connection = None

    def _forget(self, running: InFlight) -> None:
        self._close_view(running)
        super()._forget(running)

    def _close_view(self, running: InFlight) -> None:
        if running.cache is not None and running.compiled is not None:
            running.cache.close(running.compiled, keep=running.ended_well)

    @staticmethod
    def _in_cache(job: MeasureJob, cache: CompileCache | None) -> tuple[Path | None, str, Config]:
        return (None if cache is None else cache.folder), job.name, job.config

    def _held(self) -> str:
        """Memory of the process that searches, which built the task and may hold a model and data, where freeing it would matter."""
        held = []
        host_bytes = psutil.Process().memory_info().rss
        if host_bytes >= HELD_SHARE * open_device("cpu").info().free_bytes:
            held.append(f"{format_bytes(host_bytes)} of host memory")
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            gpu_bytes = sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
            if self._device.capabilities.own_memory and gpu_bytes >= HELD_SHARE * self._device.info().free_bytes:
                held.append(f"{format_bytes(gpu_bytes)} of GPUs")
        return " and ".join(held)

    def _wait(self, running: InFlight, connection: Connection, timeout_s: float | None) -> dict[str, Any] | None:
        """Read the worker's messages until the supervisor says how the worker ended; None when the time is up before."""
        must_end = self._must_end_s(running)
        deadline = must_end if timeout_s is None else min(must_end, time.monotonic() + timeout_s)
        with selectors.DefaultSelector() as selector:
            selector.register(running.channel, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while ready := {key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}:
                running.read()
                if connection in ready:
                    ended = connection.read()
                    running.read()
                    return ended
        if deadline < must_end:
            return None
        connection.kill()  # which it would not do itself when told to
        raise ProbeFault(f"the process that starts probes gave no answer within {format_seconds(PATIENCE_S)}")

    @staticmethod
    def _must_end_s(running: InFlight) -> float:
        return running.started_s + running.job.timeout_s + PATIENCE_S
