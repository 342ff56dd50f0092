"""Measures how much of the time other processes held the processors that this process wanted to run on."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil

from autotune.devices.procfs import PROC, descendants

DISTURBED = 0.1  # share of the time, above which what was measured may be wrong


def processors() -> set[int]:
    """Numbers of the processors that this process may run on."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


class ProcessorWatch:
    """Watches this process from the creation of the watch.

    Two sources, both from the kernel. `schedstat` counts for each thread how long it was runnable but waited for a
    processor; over the wall time and the compute threads that is the share of their time they lacked, and two equal
    processes on one core give 0.5. Threads of this process, and its data-loading workers, also wait for each other: the
    share is therefore bounded by what they left unused of the processors they may run on. On a virtual machine `steal`
    in `/proc/stat` counts the time the hypervisor gave to others.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._started_s = time.monotonic()
        self._waited_ns = self._thread_waits()
        self._used_s = self._processor_time()
        self._busy, self._stolen = self._ticks()

    def share(self, num_threads: int) -> float:
        """The share of the wall time so far, 0 to 1; 0 where the kernel counts nothing.

        Args:
            num_threads: compute threads of this process.
        """
        wall_s = time.monotonic() - self._started_s
        waited_ns = sum(max(0, wait - self._waited_ns.get(thread, 0)) for thread, wait in self._thread_waits().items())
        waited = waited_ns / 1e9 / (wall_s * num_threads)
        unused = 1 - (self._processor_time() - self._used_s) / (wall_s * len(processors()))
        waited = max(0.0, min(waited, unused, 1.0))
        busy, stolen = self._ticks()
        wanted = busy - self._busy + stolen - self._stolen
        steal = (stolen - self._stolen) / wanted if wanted > 0 else 0.0
        return waited + (1 - waited) * max(0.0, steal)

    def _thread_waits(self) -> dict[str, int]:
        """Nanoseconds each living thread has waited for a processor while runnable."""
        waits = {}
        for path in (self._proc / "self/task").glob("*/schedstat"):
            try:
                waits[path.parent.name] = int(path.read_text(encoding="utf-8").split()[1])
            except OSError:  # the thread ended meanwhile
                continue
        return waits

    def _processor_time(self) -> float:
        """Seconds of processor time of this process and all its children, living and reaped."""
        reaped = os.times()
        total = time.process_time() + reaped.children_user + reaped.children_system
        for pid in descendants(self._proc):
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def _ticks(self) -> tuple[int, int]:
        """(busy, stolen) clock ticks of the processors this process may run on."""
        names = {f"cpu{number}" for number in processors()}
        busy = stolen = 0
        try:
            lines = (self._proc / "stat").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0, 0
        for line in lines:
            name, *fields = line.split()
            if name in names:
                user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
                busy += user + nice + system + irq + softirq
                stolen += steal
        return busy, stolen
