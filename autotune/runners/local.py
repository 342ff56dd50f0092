"""`LocalRunner`: every job in a process of its own on this machine, behind a supervisor that starts, watches and cleans up."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from autotune.devices import open_device
from autotune.errors import StudyError
from autotune.predict.traces import Traces
from autotune.records.device import DeviceInfo
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Outcome
from autotune.records.progress import Progress
from autotune.records.result import Check
from autotune.runners.connection import Connection, describe_exit
from autotune.runners.runner import (
    CheckJob,
    Finished,
    InspectJob,
    Job,
    JobResult,
    ProbeFault,
    ProbeJob,
    Runner,
    Stated,
    TraceJob,
)
from autotune.task.source import TaskSource
from autotune.units import format_bytes, format_seconds

LOG_KEEP_BYTES = 2**20  # of what the user's code printed in one job
PATIENCE_S = 15.0  # beyond a job's time-out, until the supervisor must have answered
_NAMES = {InspectJob: "inspect", ProbeJob: "probe", CheckJob: "check", TraceJob: "trace"}


class LocalRunner(Runner):
    """Runs jobs on one device of this machine, one at a time.

    Args:
        source: how a process gets the task.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        logs: folder for what the user's code prints, one file a job; it is made when needed.
        import_timeout_s: for importing torch and the user's module.
        fork: False starts a new interpreter for each job from the outset.

    Raises:
        DeviceError: there is no such device.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        logs: Path,
        device: str = "auto",
        import_timeout_s: float = 180.0,
        fork: bool = True,
    ) -> None:
        self.task_name = source.name
        self._source = source
        self._device = open_device(device)
        self._logs = logs.absolute()
        self._import_timeout_s = import_timeout_s
        self._fork = fork
        self._widest: tuple[int, ...] | None = None  # of the dataset's samples; known after an inspection
        self._num_jobs = 0
        self._num_logs = 0
        self._connection: Connection | None = None
        self._running: _Running | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-"))
            self._channel = os.path.join(folder, "channel")
            os.mkfifo(self._channel, 0o600)
            stack.callback(self._stop)
            try:
                self._logs.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StudyError(f"the folder for logs {self._logs} cannot be made: {error.strerror}") from None
            taken = [int(log.name[:4]) for log in self._logs.glob("[0-9][0-9][0-9][0-9]-*.log")]
            self._num_logs = max(taken, default=-1) + 1  # an earlier search's logs are still named in its outcomes
            hello = self._connected().hello
            self.stated = Stated(
                model=self._source.spec, global_batch=hello["global_batch"], baseline=hello["baseline"]
            )
            if hello["reason"]:
                self.notes = (f"every probe starts a new interpreter: {hello['reason']}",)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    def now_s(self) -> float:
        """Seconds that pass on this machine."""
        return time.monotonic()

    def device(self) -> DeviceInfo:
        """The device, with what is free now."""
        return self._device.info()

    def submit(self, job: Job) -> int:
        """As `Runner.submit`: one job at a time."""
        if self._running is not None:
            raise RuntimeError("a job is running; collect it first")
        log = self._logs / f"{self._num_logs:04d}-{_NAMES[type(job)]}.log"
        self._num_logs += 1
        log.write_bytes(b"")  # a log that cannot be written is no fault of the config that is about to run
        self._num_jobs += 1
        request = {
            "ticket": self._num_jobs,
            "job": _NAMES[type(job)],
            "arguments": self._arguments(job),
            "widest": self._widest,
            "channel": self._channel,
            "log": str(log),
            "timeout_s": _timeout_s(job),
        }
        running = _Running(self._num_jobs, job, log, _open_channel(self._channel))
        try:
            self._connected().send(request)
        except BaseException:
            running.close()
            self._stop()
            raise
        if isinstance(job, TraceJob):
            running.progress = Progress(stage="tracing")
        self._running = running
        return running.ticket

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        """As `Runner.collect`."""
        running = self._running
        if running is None or self._connection is None:
            raise RuntimeError("nothing is in flight; submit a job first")
        try:
            ended = self._wait(running, self._connection, timeout_s)
        except ProbeFault as fault:
            self._running = None
            running.close()
            self._stop()
            if isinstance(running.job, TraceJob):
                return Finished(ticket=running.ticket, result=_traces(running, running.job, str(fault)))
            raise
        if ended is None:
            return None
        self._running = None
        running.close()
        return Finished(ticket=running.ticket, result=self._result(running, ended))

    def progress(self, ticket: int) -> Progress | None:
        """As `Runner.progress`."""
        if self._running is None or self._running.ticket != ticket:
            return None
        self._running.read()
        return self._running.progress

    def cancel(self, ticket: int) -> None:
        """As `Runner.cancel`."""
        if self._running is not None and self._running.ticket == ticket and self._connection is not None:
            with contextlib.suppress(ProbeFault):  # `collect` finds out, too
                self._connection.send({"cancel": ticket})

    def _connected(self) -> Connection:
        if self._connection is None:
            log = self._logs / "import.log"
            self._connection = Connection(
                self._source, log=log, import_timeout_s=self._import_timeout_s, fork=self._fork
            )
        return self._connection

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.stop()
        self._connection = None

    def _arguments(self, job: Job) -> dict[str, Any]:
        """What the worker's function for this job takes."""
        name = self._device.name
        match job:
            case InspectJob():
                absent = None if job.absent is None else asdict(job.absent)
                return {"device": name, "memory_limit_bytes": job.memory_limit_bytes, "absent": absent}
            case ProbeJob():
                return {"config": job.config.as_dict(), "device": name, "settings": job.settings.to_dict()}
            case CheckJob():
                return {
                    "config": job.config.as_dict(),
                    "device": name,
                    "memory_limit_bytes": job.settings.memory_limit_bytes,
                    "batch_size": job.batch_size,
                }
            case TraceJob():
                return {
                    "plan": job.plan.to_dict(),
                    "target": job.target,
                    "channel": self._channel,
                    "slice_s": job.slice_s,
                }

    def _wait(self, running: _Running, connection: Connection, timeout_s: float | None) -> dict[str, Any] | None:
        """Read the worker's messages until the supervisor says how the worker ended; None when the time is up before."""
        must_end = running.started_s + _timeout_s(running.job) + PATIENCE_S
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
        raise ProbeFault(f"the process that starts probes gave no answer within {format_seconds(PATIENCE_S)}")

    def _result(self, running: _Running, ended: dict[str, Any]) -> JobResult:
        """The worker's result, or an outcome when it ended without one."""
        wall_s = time.monotonic() - running.started_s
        log = _keep_tail(running.log)
        message = running.result
        if isinstance(running.job, TraceJob):
            died = "" if message else _how_it_ended(running, ended)[1]
            return _traces(running, running.job, died, timed_out=ended["timed_out"])
        if message is None or ended["timed_out"]:
            kind, cause = _how_it_ended(running, ended)
            tail = running.log.read_text(errors="replace")[-4000:] if log else ""
            progress = running.progress
            return Outcome(
                kind=kind,
                cause=cause,
                detail=tail,
                stage=progress.stage,
                log=log,
                wall_s=wall_s,
                train_s=progress.train_s,
                bound=progress.bound,
            )
        if "inspection" in message:
            inspection = Inspection.from_dict(message["inspection"])
            self._widest = tuple(inspection.facts["widest"]) or None
            return inspection
        if "check" in message:
            return Check(**message["check"])
        return Outcome.from_dict(message["outcome"] | {"wall_s": wall_s, "log": log})


@dataclass
class _Running:
    """The job in flight, and what its worker has sent so far."""

    ticket: int
    job: Job
    log: Path
    channel: int  # descriptor of the named pipe
    started_s: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)
    result: dict[str, Any] | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)  # of another kind
    _unread: bytes = b""

    def read(self) -> None:
        """Take in what has come through the pipe. A line that a kill cut short stays unread."""
        *lines, self._unread = (self._unread + _read_available(self.channel)).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "progress" in message:
                self.progress = Progress(**message["progress"])
            elif "result" in message:
                self.result = message["result"]
            else:
                self.messages.append(message)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.channel)


def _timeout_s(job: Job) -> float:
    return job.settings.timeout_s if isinstance(job, ProbeJob | CheckJob) else job.timeout_s


def _open_channel(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)  # read-write: no end of file between messages


def _how_it_ended(running: _Running, ended: dict[str, Any]) -> tuple[Kind, str]:
    stage = running.progress.stage
    if ended["timed_out"]:
        return Kind.TIMEOUT, f"killed after {format_seconds(_timeout_s(running.job))}, during {stage}"
    if ended["cancelled"]:
        return Kind.TIMEOUT, f"ended early after {format_seconds(time.monotonic() - running.started_s)}, during {stage}"
    if ended["exit_code"] == -signal.SIGKILL and ended["oom_killed"]:
        return Kind.OOM, "killed by the kernel's out-of-memory killer: the machine or its cgroup had no memory left"
    how = describe_exit(ended["exit_code"])
    hint = " before it had finished (os._exit?)" if ended["exit_code"] >= 0 else ""
    return Kind.CRASHED, f"{how}{hint}, during {stage}"


def _traces(running: _Running, job: TraceJob, died: str, *, timed_out: bool = False) -> Traces:
    """What a tracing job found. One that died has failed at the group that it had begun, or at all of them before the first."""
    found = Traces(target=job.target)
    begun = [] if timed_out else job.plan.labels()
    for message in running.messages:
        if "traces" in message:
            found = found.merged(Traces.from_dict(message["traces"]))
        elif "begun" in message:
            begun = [message["begun"]]
    if running.result is not None and "outcome" in running.result:
        died = running.result["outcome"]["cause"]
    return found.merged(Traces(target=job.target, failures=dict.fromkeys(begun, died))) if died else found


def _read_available(descriptor: int) -> bytes:
    def chunks() -> Iterator[bytes]:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(descriptor, 65536):
                yield chunk

    return b"".join(chunks())


def _keep_tail(log: Path) -> str:
    """Cut a log to its end: user code that prints megabytes must not fill the disk. Returns its path, empty when nothing was printed."""
    if not log.exists() or not log.stat().st_size:
        log.unlink(missing_ok=True)
        return ""
    if (size := log.stat().st_size) > LOG_KEEP_BYTES:
        with log.open("rb") as file:
            file.seek(size - LOG_KEEP_BYTES)
            tail = file.read()
        log.write_bytes(f"[{format_bytes(size - LOG_KEEP_BYTES)} cut]\n".encode() + tail)
    return str(log)
