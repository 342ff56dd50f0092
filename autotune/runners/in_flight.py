"""The job that a local runner has in flight: what its worker has sent so far, and what comes of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.errors import describe_exit
from autotune.prediction.traces import Traces
from autotune.records.calibration import Calibration
from autotune.records.explanation import Anatomy, ModuleTimes
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Outcome
from autotune.records.progress import COMPILING, Progress
from autotune.records.result import Check
from autotune.runners.runner import AnatomyJob, Job, JobResult, NotCompared, TraceJob
from autotune.units import format_bytes, format_seconds

LOG_KEEP_BYTES = 2**20  # of what the user's code printed in one job
LOG_TOLD = 4000  # characters of it that go into an outcome
_READ: dict[str, Callable[[Any], JobResult]] = {  # what a worker answers, other than an outcome
    "calibration": Calibration.from_dict,
    "inspection": Inspection.from_dict,
    "not_compared": lambda reason: NotCompared(reason=reason),
    "anatomies": lambda found: tuple(one if isinstance(one, str) else Anatomy.from_dict(one) for one in found),
    "modules": ModuleTimes.from_dict,
    "check": lambda found: Check(**found),
}


@dataclass
class InFlight:
    """A job whose worker may still run."""

    ticket: int
    job: Job
    log: Path  # what the user's code prints
    channel: int  # descriptor of the named pipe, or the file, through which the worker sends messages
    on_gpu: bool  # whether it trains on a GPU, whose memory is not the host's
    compiled: Path | None = None  # its view of what was compiled
    progress: Progress = field(default_factory=Progress)  # the last one that a probe reported
    started_s: float = field(default_factory=time.monotonic)
    _result: dict[str, Any] | None = None
    _compile_cold_s: float = 0.0
    _compiling_s: float = 0.0  # of the whole process in which that was
    _trace_messages: list[dict[str, Any]] = field(default_factory=list)
    _unread: bytes = b""

    def read(self) -> None:
        """Take in the messages that have come. A line that a kill cut short stays unread."""
        *lines, self._unread = (self._unread + b"".join(_available(self.channel))).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "progress" in message:
                self.progress = Progress(**message["progress"])
            elif "compile_s" in message.get("result", ()):
                self._compile_cold_s = message["result"]["compile_s"]
                self._compiling_s = time.monotonic() - self.started_s
            elif "result" in message:
                self._result = message["result"]
            else:
                self._trace_messages.append(message)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.channel)

    def result(self, ended: dict[str, Any]) -> JobResult:
        """What came of the job, once the supervisor has said how its process `ended`."""
        wall_s = time.monotonic() - self.started_s
        log = _keep_tail(self.log)
        printed = self.log.read_text(encoding="utf-8", errors="replace") if log else ""
        found = None if ended["timed_out"] else self._result
        if isinstance(self.job, TraceJob):
            if found is None:
                return self.traces(self.job, self._how_it_ended(ended, printed)[1], timed_out=ended["timed_out"])
            return self.traces(self.job, found.get("outcome", {}).get("cause", ""))
        if found is None:
            kind, cause = self._how_it_ended(ended, printed)
            return Outcome(
                kind=kind,
                cause=cause,
                detail=printed[-LOG_TOLD:],
                stage=self.progress.stage,
                log=log,
                wall_s=wall_s,
                train_s=self.progress.train_s,
                compiling_s=wall_s if self.progress.stage == COMPILING else self._compiling_s,
                bound=self.progress.bound,
            )
        ((name, data),) = found.items()
        if name != "outcome":
            return _READ[name](data)
        outcome = Outcome.from_dict(data | {"wall_s": wall_s, "compiling_s": self._compiling_s, "log": log})
        if outcome.measurement is None:
            return outcome
        return replace(outcome, measurement=replace(outcome.measurement, compile_cold_s=self._compile_cold_s))

    def traces(self, job: TraceJob, died: str, *, timed_out: bool = False) -> Traces:
        """What a tracing job found.

        Args:
            died: how it failed; empty when it did not. The group that it had begun has failed then, or, where it did not
                get to one before its time was up, none.
        """
        found = Traces(target=job.target)
        begun = [] if timed_out else job.plan.labels()
        for message in self._trace_messages:
            if "traces" in message:
                found = found.merged(Traces.from_dict(message["traces"]))
            elif "begun" in message:
                begun = [message["begun"]]
        return found.merged(Traces(target=job.target, failures=dict.fromkeys(begun, died))) if died else found

    def _how_it_ended(self, ended: dict[str, Any], printed: str) -> tuple[Kind, str]:
        """The kind of an outcome without a result, and its cause in words."""
        during = "during tracing" if isinstance(self.job, TraceJob | AnatomyJob) else f"during {self.progress.stage}"
        if ended["stuck"]:
            where = "it may hold the device's memory until the machine is restarted"
            return Kind.CRASHED, f"it was killed and does not end, {during}: it is stuck in a driver, and {where}"
        if ended["timed_out"]:
            return Kind.TIMEOUT, f"killed after {format_seconds(self.job.timeout_s)}, {during}"
        if ended["cancelled"]:
            return Kind.TIMEOUT, f"ended early after {format_seconds(time.monotonic() - self.started_s)}, {during}"
        if ended["oom_killed"] and ended["exit_code"] == -signal.SIGKILL:
            cause = "killed by the kernel's out-of-memory killer: the machine or its cgroup had no memory left"
            if self.on_gpu:
                return Kind.CRASHED, f"{cause} (the host's, not the GPU's); use fewer data workers or a larger host"
            return Kind.OOM, cause
        how = describe_exit(ended["exit_code"])
        hint = " before it had finished (os._exit?)" if ended["exit_code"] >= 0 else ""
        said = _last_words(printed)
        return Kind.CRASHED, f"{how}{hint}, {during}{f': {said}' if said else ''}"


def _last_words(printed: str) -> str:
    """The message of the C++ exception that ended a process; empty where none did. CUDA's come so while memory is freed."""
    found = re.findall(
        r"^terminate called after throwing an instance of '[^']*'\n\s*what\(\):\s*(.+)$", printed, re.MULTILINE
    )
    return found[-1].strip()[:200] if found else ""


def _available(descriptor: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 65536):
            yield chunk


def _keep_tail(log: Path) -> str:
    """Cut a log to its end, so that user code that prints megabytes does not fill the disk. Returns its path, or "" for an empty one."""
    if not log.exists() or not log.stat().st_size:
        log.unlink(missing_ok=True)
        return ""
    if (size := log.stat().st_size) > LOG_KEEP_BYTES:
        with log.open("rb") as file:
            file.seek(size - LOG_KEEP_BYTES)
            tail = file.read()
        log.write_bytes(f"[{format_bytes(size - LOG_KEEP_BYTES)} cut]\n".encode() + tail)
    return str(log)
