"""`ProcessProber`: every probe in a process of its own, behind a supervisor that starts, watches and cleans up."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from autotune.devices.cpu import num_threads
from autotune.errors import AutotuneError, StudyError, TaskError
from autotune.predict.plan import plan_traces
from autotune.predict.traces import Traces
from autotune.records.config import Config
from autotune.records.device import DeviceInfo
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Check
from autotune.records.settings import ProbeSettings
from autotune.task.source import TaskSource
from autotune.units import format_bytes, format_seconds

LOG_KEEP_BYTES = 2**20  # of what the user's code printed in one probe
_TRACE_ATTEMPTS = 3  # processes: one that dies on a group leaves the others to the next


class ProbeFault(AutotuneError):
    """The machinery around a probe failed (the supervisor died): a fault of the machine, not of the config."""


class ProcessProber:
    """Runs configs of one task, one at a time. A context manager: leaving it leaves no process behind.

    Args:
        source: how a process gets the task.
        logs: folder for what the user's code prints, one file a probe; it is made when needed.
        import_timeout_s: for importing torch and the user's module.
        fork: False starts a new interpreter for each probe from the outset.
    """

    def __init__(self, source: TaskSource, *, logs: Path, import_timeout_s: float = 180.0, fork: bool = True) -> None:
        self._source = source
        self._logs = logs.absolute()
        self._widest: tuple[int, ...] | None = None  # of the dataset's samples; known after `inspect`
        self._fork = fork
        self._import_timeout_s = import_timeout_s
        self._num_jobs = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.mode = ""
        self.mode_reason = ""

    def __enter__(self) -> ProcessProber:
        self._folder = tempfile.TemporaryDirectory(prefix="autotune-")
        self._channel = os.path.join(self._folder.name, "channel")
        os.mkfifo(self._channel, 0o600)
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._folder.cleanup()
            raise StudyError(f"the folder for logs {self._logs} cannot be made: {error.strerror}") from None
        taken = [int(log.name[:4]) for log in self._logs.glob("[0-9][0-9][0-9][0-9]-*.log")]
        self._num_jobs = max(taken, default=-1) + 1  # an earlier search's logs are still named in its outcomes
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()
        self._folder.cleanup()

    def run(self, config: Config, settings: ProbeSettings) -> Outcome:
        """Train a few steps of `config` in a fresh process. Raises ProbeFault when the supervisor itself dies."""
        arguments = {"config": config.as_dict(), "settings": settings.to_dict()}
        reply = self._job("probe", arguments, settings.timeout_s)
        return reply if isinstance(reply, Outcome) else Outcome.from_dict(reply["outcome"])

    def inspect(
        self, device: str, memory_limit_bytes: int | None, timeout_s: float, *, absent: DeviceInfo | None = None
    ) -> Inspection | Outcome:
        """Validate the task and ask what applies to it; an `Outcome` when that failed.

        Args:
            absent: a GPU that is not there, to ask for in place of `device`.
        """
        arguments = {
            "device": device,
            "memory_limit_bytes": memory_limit_bytes,
            "absent": None if absent is None else asdict(absent),
        }
        reply = self._job("inspect", arguments, timeout_s)
        if isinstance(reply, dict) and "inspection" in reply:
            inspection = Inspection.from_dict(reply["inspection"])
            self._widest = tuple(inspection.facts["widest"]) or None
            return inspection
        return reply if isinstance(reply, Outcome) else Outcome.from_dict(reply["outcome"])

    def check(self, config: Config, settings: ProbeSettings, batch_size: int) -> Check | Outcome:
        """Compare the config's gradients with plain fp32's on `batch_size` samples; an `Outcome` when that failed."""
        arguments = {
            "config": config.as_dict(),
            "device": settings.device,
            "memory_limit_bytes": settings.memory_limit_bytes,
            "batch_size": batch_size,
        }
        reply = self._job("check", arguments, settings.timeout_s)
        if isinstance(reply, dict) and "check" in reply:
            return Check(**reply["check"])
        return reply if isinstance(reply, Outcome) else Outcome.from_dict(reply["outcome"])

    def trace(self, configs: Iterable[Config], target: str, timeout_s: float, *, known: Traces | None = None) -> Traces:
        """Find the memory that configs need without running them; neither raises nor takes longer than `timeout_s`.

        Args:
            configs: a whole space, say; each group of techniques is traced once.
            target: the kind of device to predict (`autotune.devices.targets`). No GPU is needed or touched.
            timeout_s: what was found until then is kept.
            known: traces that are there already and are not traced again.

        Returns:
            `known` and what was found. Groups that could not be traced are among its `failures`, with the reason.
        """
        traces = known or Traces(target=target)
        deadline = time.monotonic() + timeout_s
        plan = plan_traces(configs)
        for _ in range(_TRACE_ATTEMPTS):
            left = plan.without(traces)
            if not left.labels():
                return traces
            arguments = {"plan": left.to_dict(), "target": target, "channel": self._channel}
            messages: list[dict[str, Any]] = []
            try:
                reply = self._job("trace", arguments, max(0.0, deadline - time.monotonic()), messages)
                why = reply.cause if isinstance(reply, Outcome) else reply.get("outcome", {}).get("cause", "")
                timed_out = isinstance(reply, Outcome) and reply.kind is Kind.TIMEOUT
            except ProbeFault as error:
                why, timed_out = str(error), False
            for message in messages:
                if "traces" in message:
                    traces = traces.merged(Traces.from_dict(message["traces"]))
            begun = [message["begun"] for message in messages if "begun" in message]
            if timed_out:
                spent = format_seconds(timeout_s)
                killed = {begun[-1]: f"killed after {spent} of tracing"} if begun else {}
                traces = traces.merged(Traces(target=target, failures=killed))
                why = f"the {spent} for tracing had passed"
                break
            if why:
                traces = traces.merged(Traces(target=target, failures={begun[-1]: why} if begun else {}))
        return traces.merged(Traces(target=target, failures=dict.fromkeys(plan.without(traces).labels(), why)))

    def _start(self) -> None:
        self._import_log = self._logs / "import.log"
        try:
            log = self._import_log.open("wb")
        except OSError as error:
            raise StudyError(
                f"the log {self._import_log} cannot be written: {error.strerror}; expected a file that may be "
                "written, on a disk with room: put that right and run again"
            ) from error
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        blas_threads = 0
        if "OPENBLAS_NUM_THREADS" not in environment:  # else numpy's BLAS starts threads in the fork server
            environment["OPENBLAS_NUM_THREADS"] = "1"
            blas_threads = num_threads()
        greeting = {
            "source": self._source.to_dict(),
            "blas_threads": blas_threads,
            "fork": self._fork,
            "parent": os.getpid(),
        }
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autotune.runners.supervisor", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        theirs.close()
        self._connection = ours
        self._replies = ours.makefile("r")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(greeting).encode() + b"\n")
            self._process.stdin.close()
        ours.settimeout(self._import_timeout_s)
        try:
            line = self._replies.readline()
        except TimeoutError:
            self._import_failed(f"did not end within {format_seconds(self._import_timeout_s)}")
        ours.settimeout(None)
        if not line:
            self._import_failed(describe_exit(self._process.wait()))
        hello = json.loads(line)
        if "error" in hello:
            raise TaskError(hello["error"], frames=hello.get("frames", ""))
        self.mode, self.mode_reason = hello["mode"], hello["reason"]
        self.global_batch: int | None = hello["global_batch"]
        self.baseline: dict[str, Any] | None = hello["baseline"]

    def _import_failed(self, what: str) -> NoReturn:
        tail = self._import_log.read_text(errors="replace").strip()[-1500:]
        raise TaskError(
            f"importing {self._source.label} {what}; run `{os.path.basename(sys.executable)} {self._source.label}` "
            "to see it fail, and keep long or dangerous work inside the functions",
            frames=tail,
        )

    def _stop(self) -> None:
        if self._process is None:
            return
        self._connection.close()
        self._replies.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _job(
        self, job: str, arguments: dict[str, Any], timeout_s: float, heard: list[dict[str, Any]] | None = None
    ) -> dict[str, Any] | Outcome:
        """Run one job. Returns the worker's result, or an outcome when it ended without one.

        `heard` receives every message of the worker.
        """
        if self._process is None:
            self._start()
        log = self._logs / f"{self._num_jobs:04d}-{job}.log"
        self._num_jobs += 1
        log.write_bytes(b"")  # a log that cannot be written is no fault of the config that is about to run
        request = {
            "job": job,
            "arguments": arguments,
            "widest": self._widest,
            "channel": self._channel,
            "log": str(log),
            "timeout_s": timeout_s,
        }
        started = time.monotonic()
        channel = os.open(self._channel, os.O_RDWR | os.O_NONBLOCK)  # read-write: no end of file between messages
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            messages, ended = self._listen(channel, timeout_s + 15)
        except (OSError, ProbeFault) as error:
            self._stop()
            raise ProbeFault(f"the process that starts probes failed: {error}") from error
        finally:
            os.close(channel)
        if heard is not None:
            heard += messages
        log_path = _keep_tail(log)
        result = next((message["result"] for message in messages if "result" in message), None)
        wall_s = time.monotonic() - started
        if result is not None and not ended["timed_out"]:
            if "outcome" in result:
                result["outcome"] |= {"wall_s": wall_s, "log": log_path}
            return result  # type: ignore[no-any-return]
        begun: dict[str, Any] = {"stage": "setup", "train_s": 0.0}
        last = next((message for message in reversed(messages) if "stage" in message), begun)
        kind, cause = _how_it_ended(ended, timeout_s, last["stage"])
        tail = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        return Outcome(
            kind=kind,
            cause=cause,
            detail=tail,
            stage=last["stage"],
            train_s=last["train_s"],
            wall_s=wall_s,
            log=log_path,
        )

    def _listen(self, channel: int, patience_s: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Collect the worker's messages until the supervisor says how the worker ended."""
        received = b""
        deadline = time.monotonic() + patience_s
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            selector.register(self._connection, selectors.EVENT_READ)
            ended = ""
            while not ended:
                ready = {key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                if not ready:
                    raise ProbeFault(f"no answer within {format_seconds(patience_s)}")
                received += _read_available(channel)
                if self._connection in ready:
                    ended = self._replies.readline()
                    if not ended:
                        raise ProbeFault(describe_exit(self._process.wait() if self._process else 0))
        received += _read_available(channel)
        messages = []
        for line in received.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # cut short by a kill
                messages.append(json.loads(line))
        return messages, json.loads(ended)


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words: `died of SIGSEGV (segmentation fault)`, `exited with status 1`."""
    if exit_code < 0:
        number = signal.Signals(-exit_code)
        return f"died of {number.name} ({signal.strsignal(number)})"
    return f"exited with status {exit_code}"


def _how_it_ended(ended: dict[str, Any], timeout_s: float, stage: str) -> tuple[Kind, str]:
    if ended["timed_out"]:
        return Kind.TIMEOUT, f"killed after {format_seconds(timeout_s)}, during {stage}"
    if ended["exit_code"] == -signal.SIGKILL and ended["oom_killed"]:
        return Kind.OOM, "killed by the kernel's out-of-memory killer: the machine or its cgroup had no memory left"
    how = describe_exit(ended["exit_code"])
    hint = " before it had finished (os._exit?)" if ended["exit_code"] >= 0 else ""
    return Kind.CRASHED, f"{how}{hint}, during {stage}"


def _read_available(descriptor: int) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, 65536):
            data += chunk
    return data


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
