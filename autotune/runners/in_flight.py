"""Jobs in flight: in which slot each is, which others are beside it, what a worker of this machine has sent, and what comes of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.errors import describe_exit
from autotune.records.outcome import COMPILING, Kind, Outcome, Progress
from autotune.runners.compile_cache import CompileCache
from autotune.runners.jobs import Job, TracingJob
from autotune.runners.ranks import Part, Told, culprit, measured_together, read_ranks, waited_for
from autotune.units import format_bytes, format_seconds

LOG_KEEP_BYTES = 2**20  # of what the user's code printed in one job
LOG_TOLD = 4000  # characters of it that go into an outcome


@dataclass
class Stay:
    """A job in a slot, and the labels of the jobs that were in flight beside it so far."""

    ticket: int
    job: Job[Any]
    slot: str
    device: str
    beside: list[str] = field(default_factory=list)

    def place(self, result: Any) -> Any:
        """The job's result; an outcome also gets its slot, device, world, and the labels of the jobs that were beside it."""
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
            RuntimeError: there is none of that name, or it, or each of them, is taken.
        """
        if wanted and wanted not in slots:
            raise RuntimeError(f"there is no slot {wanted}; there is {', '.join(slots)}")
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

    def put_beside(self, ticket: int, labels: Iterable[str]) -> None:
        """Say which jobs that are kept elsewhere have been in flight beside a job of this one, if that has not ended."""
        if ticket in self._stays:
            self._stays[ticket].beside[:] = labels

    def leave(self, ticket: int) -> Stay:
        """Free a job's slot, once it has ended."""
        return self._stays.pop(ticket)


@dataclass
class InFlight:
    """A job whose worker may still run."""

    stay: Stay
    log: Path  # what the user's code prints
    channel: int  # descriptor of the named pipe, or the file, through which the worker sends messages
    on_gpu: bool  # whether it trains on a GPU, whose memory is not the host's
    cache: CompileCache | None = None  # of what it compiles
    compiled: Path | None = None  # its view of that
    path: str = ""  # of the channel, beside which the ranks above 0 write
    num_ranks: int = 1
    part: Part | None = None  # of a world that several machines run
    progress: Progress = field(default_factory=Progress)  # the last one that a probe reported
    ended_well: bool = False  # its process, whatever came of the job
    started_s: float = field(default_factory=time.monotonic)
    _result: dict[str, Any] | None = None
    _ended_s: float = 0.0  # when that was told
    _compile_cold_s: float = 0.0
    _compiling_s: float = 0.0  # from the job's start until that was reported
    _told: list[dict[str, Any]] = field(default_factory=list)  # parts of the answer
    _unread: bytes = b""

    @property
    def job(self) -> Job[Any]:
        """What it does."""
        return self.stay.job

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
                self._result, self._ended_s = message["result"], message["ended_s"]
            else:
                self._told.append(message)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.channel)

    def found(self) -> Any:
        """What the worker has found so far; None where that is not known."""
        self.read()
        return self.job.found(self._told)

    def failed(self, outcome: Outcome) -> Any:
        """What is left of the job, which failed."""
        return self.stay.place(self.job.failed(outcome, self._told))

    def result(self, ended: dict[str, Any]) -> Any:
        """What came of the job, once the supervisor has said how its process `ended`."""
        wall_s = time.monotonic() - self.started_s
        log = _keep_tail(self.log)
        printed = self.log.read_text(encoding="utf-8", errors="replace") if log else ""
        found, rank = (None, None) if ended["timed_out"] else self._answer(ended)
        first = 0 if self.part is None else self.part.first
        of_rank = "" if rank is None else f"rank {first + rank}: "
        if found is None:
            if rank is not None:
                ended = ended | {"exit_code": ended["exit_codes"][rank]}
            kind, cause = self._how_it_ended(ended, printed)
            waited = waited_for(ended["answers"], ended["killed"], first) if kind is Kind.TIMEOUT else ""
            ended_early = Outcome(
                kind=kind,
                cause=f"{of_rank}{cause}{waited and f'; {waited}'}",
                waited_for=waited,
                detail=printed[-LOG_TOLD:],
                stage=self.progress.stage,
                log=log,
                wall_s=wall_s,
                train_s=self.progress.train_s,
                compiling_s=wall_s if self.progress.stage == COMPILING else self._compiling_s,
                bound=self.progress.bound,
                # those beside it may have held the memory
                crowded=_by_kernel(ended) and bool(self.stay.beside),
            )
            return self.failed(ended_early)
        if "outcome" in found:
            outcome = found["outcome"] | {"wall_s": wall_s, "compiling_s": self._compiling_s, "log": log}
            if outcome["kind"] not in (
                Kind.OK,
                Kind.NONFINITE,
            ):  # not finite in all: the cause itself names whose it was
                outcome["cause"] = of_rank + outcome["cause"]
            if outcome["measurement"] is not None:
                outcome["measurement"] |= {"compile_cold_s": self._compile_cold_s}
            found = {"outcome": outcome}
        return self.stay.place(self.job.read(found, self._told))

    def _answer(self, ended: dict[str, Any]) -> tuple[dict[str, Any] | None, int | None]:
        """The worker's answer; of several ranks that of the worst, with its number here where it failed, None where it gave none."""
        if (self.num_ranks == 1 and self.part is None) or ended["cancelled"]:
            return self._result, None
        told = [] if self._result is None else [Told(rank=0, answer=self._result, ended_s=self._ended_s)]
        told += read_ranks(self.path, self.num_ranks)
        if (rank := culprit(told, ended)) is not None:
            return next((one.answer for one in told if one.rank == rank), None), rank
        if len(told) < self.num_ranks:
            return None, None
        if "outcome" not in told[0].answer:
            return told[0].answer, None
        outcomes = [Outcome.from_dict(one.answer["outcome"]) for one in told]
        together = measured_together([outcome.measurement for outcome in outcomes if outcome.measurement is not None])
        return {"outcome": replace(outcomes[0], measurement=together).to_dict()}, None

    def _how_it_ended(self, ended: dict[str, Any], printed: str) -> tuple[Kind, str]:
        """The kind of an outcome without a result, and its cause in words."""
        during = "during tracing" if isinstance(self.job, TracingJob) else f"during {self.progress.stage}"
        if ended["stuck"]:
            where = "it may hold the device's memory until the machine is restarted"
            return Kind.CRASHED, f"it was killed and does not end, {during}: it is stuck in a driver, and {where}"
        if ended["timed_out"]:
            return Kind.TIMEOUT, f"killed after {format_seconds(self.job.timeout_s)}, {during}"
        if ended["cancelled"]:
            return Kind.TIMEOUT, f"ended early after {format_seconds(time.monotonic() - self.started_s)}, {during}"
        if _by_kernel(ended):
            cause = "killed by the kernel's out-of-memory killer: the machine or its cgroup had no memory left"
            if self.on_gpu:
                return Kind.CRASHED, f"{cause} (the host's, not the GPU's); use fewer data workers or a larger host"
            return Kind.OOM, cause
        how = describe_exit(ended["exit_code"])
        hint = " before it had finished (os._exit?)" if ended["exit_code"] >= 0 else ""
        said = _last_words(printed)
        return Kind.CRASHED, f"{how}{hint}, {during}{f': {said}' if said else ''}"


def _by_kernel(ended: Mapping[str, Any]) -> bool:
    """Whether the kernel's out-of-memory killer ended a process."""
    return bool(ended["oom_killed"]) and ended["exit_code"] == -signal.SIGKILL


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
