"""What Linux says of this process and its children: memory in bytes, what the control groups allow, who held the processors.

What the figures of memory mean, as measured over training runs (transformer, convolutions, LSTM; 0.5 to 5 GiB):

- `VmData` is what `RLIMIT_DATA` bounds: private writable memory, touched or not. The kernel keeps no peak of it.
- `VmPeak - (VmSize - VmData)` is its peak as long as the other mappings (code, read-only files, shared memory) stay:
  in every run it agreed to the MiB with sampling every 3 ms. The kernel keeps `VmPeak` itself, so no short peak is missed.
- `VmHWM - RssFile - RssShmem` is the peak of the touched part, 90 to 230 MiB less (thread stacks, tails of buffers).

A control group's limit (v1 or v2) may sit on any ancestor, so every directory from this process's group up to the mount is read. In
a container the path in `/proc/self/cgroup` may be the host's while only the container's part is mounted; then the mount itself
counts as the group.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
PROC, ROOT = Path("/proc"), Path("/")
DISTURBED = 0.1  # where others held more than this share of the time, a measurement may be wrong
_UNLIMITED = 2**62  # v1 writes the largest multiple of the page size for "no limit"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """A process's memory in bytes; the module's docstring explains the figures."""

    data_bytes: int  # VmData, without what does not count
    touched_bytes: int  # RssAnon, and the part that was swapped out
    peak_touched_bytes: int
    shared_bytes: int  # RssShmem, e.g. batches that data-loading workers handed over
    peak_size_data_bytes: int  # VmPeak - (VmSize - VmData)

    def peak_data_bytes(self, limit_bytes: int | None = None) -> int:
        """Peak of `VmData`.

        A large mapping of something else (a file, say), since closed, also raised `VmPeak`. The figure then exceeds the limit,
        or twice what was ever touched; in that case the touched peak plus what is untouched now replaces it.
        """
        untouched = max(0, self.data_bytes - self.touched_bytes)
        believable = 2 * self.peak_touched_bytes + untouched
        if limit_bytes is not None:
            believable = min(believable, limit_bytes)
        peak = self.peak_size_data_bytes
        if peak > believable:
            peak = min(believable, self.peak_touched_bytes + untouched)
        return max(peak, self.data_bytes)


def process_memory(uncounted_bytes: int = 0) -> ProcessMemory:
    """This process's memory now; where there is no /proc, the touched memory stands for every figure.

    Args:
        uncounted_bytes: of `VmData`, which do not count.
    """
    if not PROC.exists():
        touched = psutil.Process().memory_info().rss
        return ProcessMemory(
            data_bytes=touched,
            touched_bytes=touched,
            peak_touched_bytes=touched,
            shared_bytes=0,
            peak_size_data_bytes=touched,
        )
    status = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in read(PROC / "self/status").splitlines())
        if name.startswith(("Vm", "Rss"))
    }
    data_bytes = status["VmData"] - uncounted_bytes
    # gVisor tells sizes and all that is resident, and neither peaks nor kinds
    shared, of_files = status.get("RssShmem", 0), status.get("RssFile", 0)
    touched = status.get("RssAnon", status["VmRSS"]) + status.get("VmSwap", 0)
    peak_touched = status.get("VmHWM", status["VmRSS"]) - of_files - shared + status.get("VmSwap", 0)
    return ProcessMemory(
        data_bytes=data_bytes,
        touched_bytes=touched,
        peak_touched_bytes=max(peak_touched, touched),
        shared_bytes=shared,
        peak_size_data_bytes=status.get("VmPeak", status["VmSize"]) - (status["VmSize"] - data_bytes),
    )


class _Mallinfo2(ctypes.Structure):
    """What glibc tells of all its heaps, mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def free_heap_bytes() -> int:
    """What this process's heaps hold free for its next allocations; 0 where the C library does not tell (glibc does from 2.33 on)."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)


def descendants(proc: Path = PROC) -> Iterator[int]:
    """Process ids of this process's living children, their children, and so on.

    `psutil.Process.children` reads every process of the machine, which takes 14 us each. On a large server that is too slow
    between the timed blocks of a probe.
    """
    unseen = [os.getpid()]
    while unseen:
        for task in (proc / str(unseen.pop()) / "task").glob("*/children"):
            children = [int(pid) for pid in read(task).split()]  # a process that ended meanwhile has none
            yield from children
            unseen += children


def descendants_private_bytes() -> int:
    """Memory that belongs to descendants alone, without the pages that they share with this process."""
    total = 0
    for pid in descendants():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or belongs to another user
            total += psutil.Process(pid).memory_full_info().uss
    return total


@dataclass(frozen=True)
class MemoryAllowance:
    """A group's memory limit and what is left of it. Reclaimable file cache counts as free."""

    limit_bytes: int
    free_bytes: int


def memory_allowance(root: Path = ROOT) -> MemoryAllowance | None:
    """The tightest memory limit, and the smallest remainder, of this process's control groups; None without a limit."""
    limits: list[int] = []
    free: list[int] = []
    for directory, names in _directories(root, "memory", _V1_MEMORY, _V2_MEMORY):
        bounds = [value for name in names.limits if (value := read_number(directory / name)) is not None]
        used = read_number(directory / names.used)
        if not bounds or used is None or min(bounds) >= _UNLIMITED:
            continue
        statistics = _table(directory / "memory.stat")
        reclaimable = sum(statistics.get(name, 0) for name in names.reclaimable)
        limits.append(min(bounds))
        free.append(max(0, min(bounds) - max(0, used - reclaimable)))
    return MemoryAllowance(min(limits), min(free)) if limits else None


def processor_quota(root: Path = ROOT) -> float | None:
    """Number of processors that the control groups allow (`docker --cpus`); None without a quota."""
    quotas = []
    for directory, is_v2 in _directories(root, "cpu", False, True):
        if is_v2:
            quota, _, period = read(directory / "cpu.max").partition(" ")
        else:
            quota, period = read(directory / "cpu.cfs_quota_us"), read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # not "max" or -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def kernel_oom_kills(root: Path = ROOT) -> int:
    """Processes that the kernel's out-of-memory killer has killed in this control group (v2: and below it), or else on this machine.

    If the number has risen, a SIGKILL came from the kernel and not from a user. 0 if the kernel does not count.
    """
    for directory, name in _directories(root, "memory", "memory.oom_control", "memory.events"):
        if (kills := _table(directory / name).get("oom_kill")) is not None:
            return kills
    return _table(root / "proc/vmstat").get("oom_kill", 0)


@dataclass(frozen=True)
class _MemoryFiles:
    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]  # keys of memory.stat, descendants included


_V1_MEMORY = _MemoryFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_V2_MEMORY = _MemoryFiles(
    ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable")
)


def _directories(root: Path, controller: str, v1: T, v2: T) -> Iterator[tuple[Path, T]]:
    """This process's group and its ancestors, innermost first, in each hierarchy that may hold `controller`."""
    paths: dict[str, str] = {}
    for line in read(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        for name in names.split(",") if names else (["v2"] if number == "0" else []):
            paths[name] = path
    for line in read(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind == "cgroup2" and "v2" in paths:
            path, value = paths["v2"], v2
        elif kind == "cgroup" and controller in options.split(",") and controller in paths:
            path, value = paths[controller], v1
        else:
            continue
        mount_root, mount_point = (_unescape(field) for field in mount.split(" ")[3:5])
        top = root / mount_point.lstrip("/")
        below = os.path.relpath(path, mount_root)
        group = top if below.startswith("..") else top / below
        while True:
            yield group, value
            if group == top:
                break
            group = group.parent


def _unescape(field: str) -> str:
    for octal, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(octal, character)
    return field


def read(path: Path) -> str:
    """The text of a file of the kernel's; empty where it cannot be read. Names in it are bytes of any kind."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # no such process, controller, version or permission here
        return ""


def read_number(path: Path) -> int | None:
    """The number in a file of the kernel's; None where there is none, or it cannot be read."""
    text = read(path)
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def end_with_parent(ends: bool = True) -> None:
    """Let this process be killed when the one that started it ends, or not any more."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if ends else 0)


def processors() -> set[int]:
    """Numbers of the processors that this process may run on."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def processors_near(bus_id: str, root: Path = ROOT) -> set[int]:
    """Numbers of the processors on the NUMA node of a PCI device; empty where the kernel does not say.

    Args:
        bus_id: as NVML writes it, `00000000:3B:00.0`; the kernel has four digits of the domain, in lower case.
    """
    domain, _, place = bus_id.lower().partition(":")
    return _numbers(read(root / f"sys/bus/pci/devices/{domain[-4:]}:{place}/local_cpulist"))


def cores(numbers: Iterable[int], root: Path = ROOT) -> list[tuple[int, ...]]:
    """Processors grouped by the physical core that they share, neighbours first: by NUMA node, then by socket and core."""
    nodes = {
        number: int(node.name.removeprefix("node"))
        for node in (root / "sys/devices/system/node").glob("node[0-9]*")
        for number in _numbers(read(node / "cpulist"))
    }
    found: dict[tuple[int, int, int], list[int]] = {}
    for number in sorted(numbers):
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        socket, core = read_number(topology / "physical_package_id"), read_number(topology / "core_id")
        # where the kernel does not say, each processor is a core of its own
        key = nodes.get(number, 0), socket or 0, number if core is None else core
        found.setdefault(key, []).append(number)
    return [tuple(found[key]) for key in sorted(found)]


def _numbers(ranges: str) -> set[int]:
    """The numbers of a list such as `0-3,8`."""
    edges = [part.partition("-") for part in ranges.split(",") if part]
    return {number for low, _, high in edges for number in range(int(low), int(high or low) + 1)}


class ProcessorWatch:
    """Measures, from its creation on, the share of time in which others held the processors that this process wanted.

    Two counters of the kernel tell. `schedstat` counts for each thread how long it was runnable but waited for a processor.
    Divided by wall time and compute threads, this is the share of their time that the threads lacked: 0.5 for two equal
    processes on one core. Threads of this process, and its data-loading workers, also wait for each other, so the share is
    bounded twice: by what they left unused of their processors, and by the time that others worked there, which `/proc/stat`
    counts. On a virtual machine its `steal` counts the time that the hypervisor gave to others.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._started_s = time.monotonic()
        self._waited_ns = self._thread_waits()
        self._used_s = self._processor_time()
        self._busy, self._stolen = self._ticks()
        self._worked_before = self._worked()

    def share(self, num_threads: int) -> float:
        """The share of the wall time so far, 0 to 1; 0 where the kernel counts nothing.

        Args:
            num_threads: compute threads of this process.
        """
        wall_s = time.monotonic() - self._started_s
        waited_ns = sum(max(0, wait - self._waited_ns.get(thread, 0)) for thread, wait in self._thread_waits().items())
        waited = waited_ns / 1e9 / (wall_s * num_threads)
        may_use = min(len(processors()), processor_quota() or math.inf)  # a container may be granted fewer than it sees
        own_s = self._processor_time() - self._used_s
        unused = 1 - own_s / (wall_s * may_use)
        busy, stolen = (now - before for now, before in zip(self._ticks(), (self._busy, self._stolen), strict=True))
        by_others = (busy / os.sysconf("SC_CLK_TCK") - own_s) / wall_s if busy > 0 else math.inf
        waited = max(0.0, min(waited, unused, by_others, 1.0))
        wanted = busy + stolen
        steal = stolen / wanted if wanted > 0 else 0.0
        return waited + (1 - waited) * max(0.0, steal)

    def own_work(self) -> float:
        """Share of what all processors have worked so far that this process and its children did; 1 where the kernel counts nothing."""
        worked_s = (self._worked() - self._worked_before) / os.sysconf("SC_CLK_TCK")
        own_s = self._processor_time() - self._used_s
        return min(1.0, own_s / worked_s) if worked_s > 0 else 1.0

    def _thread_waits(self) -> dict[str, int]:
        """Nanoseconds each living thread has waited for a processor while runnable."""
        threads = {path.parent.name: read(path).split() for path in (self._proc / "self/task").glob("*/schedstat")}
        # a thread that ended meanwhile has no figures
        return {thread: int(figures[1]) for thread, figures in threads.items() if figures}

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
        for line in read(self._proc / "stat").splitlines():
            name, *fields = line.split()
            if name in names:
                user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
                busy += user + nice + system + irq + softirq
                stolen += steal
        return busy, stolen

    def _worked(self) -> int:
        """Clock ticks in which all processors of the machine worked."""
        name, *fields = read(self._proc / "stat").partition("\n")[0].split() or [""]
        if name != "cpu":
            return 0
        user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[:7])
        return user + nice + system + irq + softirq
