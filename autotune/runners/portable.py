"""`PortableRunner`: inspections and traces, which need no memory limit, on any system: each in a new interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import psutil

from autotune.runners.in_flight import InFlight, Stay
from autotune.runners.jobs import InspectJob, TracingJob
from autotune.runners.local import OneSlotRunner
from autotune.runners.runner import Finished, ProbeFault, Stated
from autotune.task.loading import load_source
from autotune.task.source import TaskSource


class PortableRunner(OneSlotRunner):
    """Runs what trains no config, where `LocalRunner` cannot run.

    Args:
        source: how a process gets the task. Entering the runner loads it in this process, too.
        device, logs: as of `OneSlotRunner`.
    """

    def __init__(self, source: TaskSource, *, logs: Path, device: str = "auto") -> None:
        super().__init__(device, logs)
        self.task_name = source.name
        self._source = source
        self._process: subprocess.Popen[bytes]  # of the job that runs

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-")))
            stack.callback(self._end)
            self._logs.mkdir(parents=True, exist_ok=True)
            task = load_source(self._source)
            self._source = self._source.hand_over(self._folder)
            self._resources = stack.pop_all()
        self.stated = Stated.of(task, self._source)
        return self

    def _start(self, stay: Stay) -> InFlight:
        """An inspection or a trace. Raises ProbeFault for another job."""
        job = stay.job
        if not isinstance(job, InspectJob | TracingJob):
            raise ProbeFault(f"{job.name} trains, which takes Linux")
        channel, request = self._folder / f"{stay.ticket}.channel", self._folder / f"{stay.ticket}.json"
        channel.touch()
        log = self._logs / f"{job.name}.log"
        log.write_bytes(b"")
        asked: dict[str, Any] = {
            "job": job.name,
            "compiled": "",
            "arguments": self._arguments(job),
            "blas_threads": 0,
            "widest": None,
            "channel": str(channel),
            "rank": 0,
            "num_ranks": 1,
            "meeting": "",
            "log": str(log),
            "source": self._source.to_dict(),
        }
        request.write_text(json.dumps(asked), encoding="utf-8")
        own_memory = self._device.capabilities.own_memory
        running = InFlight(stay, log, os.open(channel, os.O_RDONLY), on_gpu=own_memory)
        command = [sys.executable, "-m", "autotune.runners.worker", str(request)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return running

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        if self._running is None:
            raise RuntimeError("nothing is in flight; submit a job first")
        running, process = self._running, self._process
        left_s = max(0.0, running.started_s + running.job.timeout_s - time.monotonic())
        timed_out = False
        try:
            process.wait(left_s if timeout_s is None else min(left_s, timeout_s))
        except subprocess.TimeoutExpired:
            if timeout_s is not None and timeout_s < left_s:
                return None
            timed_out = True
        self._kill()
        running.read()
        ended: dict[str, Any] = {
            "exit_code": process.returncode,
            "timed_out": timed_out,
            **dict.fromkeys(("stuck", "cancelled", "oom_killed"), False),
            "killed": [0] if timed_out else [],
            "answers": {},  # nobody asks where it is
        }
        result = running.result(ended)
        self._end()
        return Finished(ticket=running.stay.ticket, result=result)

    def cancel(self, ticket: int) -> None:
        if self._in_flight(ticket) is not None:
            self._kill()

    def _kill(self) -> None:
        """End the job's process and what it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self._process.kill()
        self._process.wait()

    def _end(self) -> None:
        if self._running is not None:
            self._kill()
            self._forget(self._running)
