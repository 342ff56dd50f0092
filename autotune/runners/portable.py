"""`PortableRunner`: inspections and traces, which need no memory limit, on any system: each in a new interpreter."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import psutil

from autotune.devices import open_device
from autotune.records.device import DeviceInfo
from autotune.records.progress import Progress
from autotune.runners.in_flight import InFlight
from autotune.runners.jobs import InspectJob, Job, TracingJob
from autotune.runners.runner import Finished, ProbeFault, Runner, Stated
from autotune.task.loading import load_source
from autotune.task.source import TaskSource


class PortableRunner(Runner):
    """Runs what trains no config, where `LocalRunner` cannot run.

    Args:
        source: how a process gets the task. Entering the runner loads it in this process, too.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        logs: folder for what the user's code prints.

    Raises:
        DeviceError: there is no such device.
    """

    def __init__(self, source: TaskSource, *, logs: Path, device: str = "auto") -> None:
        self.task_name = source.name
        self._source = source
        self._device = open_device(device)
        self._logs = logs.absolute()
        self._num_jobs = 0
        self._running: tuple[InFlight, subprocess.Popen[bytes]] | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-")))
            stack.callback(self._end)
            self._logs.mkdir(parents=True, exist_ok=True)
            task = load_source(self._source)
            self._source = self._source.hand_over(self._folder)
            self._resources = stack.pop_all()
        self.stated = Stated(
            model=replace(self._source, attribute=TaskSource.of(task).attribute).spec,
            global_batch=task.global_batch,
            baseline=task.baseline,
            trained=self.techniques.trained_by(task, task.baseline or {}),
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._resources.close()

    def now_s(self) -> float:
        """Seconds that pass on this machine."""
        return time.monotonic()

    def device(self) -> DeviceInfo:
        """The device, with what is free now."""
        return self._device.info()

    def submit(self, job: Job[Any]) -> int:
        """As `Runner.submit`, for an inspection or a trace. Raises ProbeFault for another job."""
        if not isinstance(job, InspectJob | TracingJob):
            raise ProbeFault(f"{job.name} trains, which takes Linux")
        self._num_jobs += 1
        channel, request = self._folder / f"{self._num_jobs}.channel", self._folder / f"{self._num_jobs}.json"
        channel.touch()
        log = self._logs / f"{job.name}.log"
        log.write_bytes(b"")
        asked: dict[str, Any] = {
            "job": job.name,
            "compiled": "",
            "arguments": {"device": self._device.name, **job.arguments()},
            "blas_threads": 0,
            "widest": None,
            "channel": str(channel),
            "log": str(log),
            "source": self._source.to_dict(),
        }
        request.write_text(json.dumps(asked), encoding="utf-8")
        own_memory = self._device.capabilities.own_memory
        running = InFlight(self._num_jobs, job, log, os.open(channel, os.O_RDONLY), on_gpu=own_memory)
        command = [sys.executable, "-m", "autotune.runners.worker", str(request)]
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._running = running, process
        return running.ticket

    def collect(self, timeout_s: float | None = None) -> Finished | None:
        """As `Runner.collect`."""
        if self._running is None:
            raise RuntimeError("nothing is in flight; submit a job first")
        running, process = self._running
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
        ended = {
            "exit_code": process.returncode,
            "timed_out": timed_out,
            **dict.fromkeys(("stuck", "cancelled", "oom_killed"), False),
        }
        result = running.result(ended)
        self._end()
        return Finished(ticket=running.ticket, result=result)

    def progress(self, ticket: int) -> Progress | None:
        """As `Runner.progress`: of probes alone, which do not run here."""
        return None

    def found(self, ticket: int) -> Any:
        """As `Runner.found`."""
        running = self._running and self._running[0]
        return None if running is None or running.ticket != ticket else running.found()

    def cancel(self, ticket: int) -> None:
        """As `Runner.cancel`."""
        if self._running is not None and self._running[0].ticket == ticket:
            self._kill()

    def _kill(self) -> None:
        """End the job's process and what it has started."""
        assert self._running is not None
        process = self._running[1]
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()

    def _end(self) -> None:
        if self._running is not None:
            self._kill()
            self._running[0].close()
        self._running = None
