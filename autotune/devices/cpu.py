"""The CPU as a device: real limits, real out-of-memory errors, real contention."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import psutil

from autotune.devices import linux, rapl
from autotune.devices.base import Capabilities, Device, Telemetry
from autotune.devices.linux import ProcessorWatch, processors
from autotune.errors import DeviceError
from autotune.lazy import torch, torch_if_imported
from autotune.records.device import DeviceInfo
from autotune.task import handed_over
from autotune.units import GIB, MIB, format_bytes, plural

# this much of the host's free memory is left for all others and for the kernel, which kills where nothing is left
_RESERVE_BYTES = GIB
THREAD_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # the first that is set says how many threads torch takes
_LEAST_SHARE = 0.5  # where little is free, a process may still take this share of it
# how near its limit a process must be to blame memory for oneDNN's failures: these were seen up to 9 MiB below the limit in
# convolutions and linear layers (small buffers), and 46 MiB below a limit of 280 MiB in an LSTM (a workspace)
_AT_LIMIT_BYTES, _AT_LIMIT_SHARE = 64 * MIB, 0.2


class CpuDevice(Device):
    """This machine's processors and memory, as far as this process's control group and affinity allow.

    The limit is `RLIMIT_DATA`. It bounds all private writable memory of each process (`VmData`), touched or not, including
    libraries' data and thread stacks, but for the mapped file of a Task built in Python. `peak_bytes` is on the same scale, and adds what
    data-loading workers hold.

    Args:
        notes: remarks for `info`.
    """

    name = "cpu"
    kind = "cpu"
    capabilities = Capabilities()

    def __init__(self, *, notes: tuple[str, ...] = ()) -> None:
        self._notes = notes
        self._limit_bytes: int | None = None
        self._workers_peak_bytes = 0
        self._oom_kills = linux.kernel_oom_kills()
        self._watch = ProcessorWatch()
        self._energy = rapl.EnergyWatch()

    def info(self) -> DeviceInfo:
        """Describe the processors and the memory now."""
        machine = psutil.virtual_memory()
        total_bytes, free_bytes = machine.total, machine.available
        if allowance := linux.memory_allowance():
            total_bytes = min(total_bytes, allowance.limit_bytes)
            free_bytes = min(free_bytes, allowance.free_bytes)
        threads = num_threads()
        notes = self._notes
        quota = linux.processor_quota()
        if quota is not None and threads > quota + 0.5:
            note = f"the control group allows {quota:g} processor{'' if quota == 1 else 's'}, but torch uses {plural(threads, 'thread')}; "
            notes += (note + f"set OMP_NUM_THREADS={max(1, round(quota))}",)
        return DeviceInfo(
            name=self.name,
            model=processor_model(),
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            num_threads=threads,
            torch_version=metadata.version("torch"),
            no_energy=self.why_no_energy(),
            notes=notes,
        )

    def telemetry(self) -> Telemetry:
        """Load averages and memory: `load_1m`, `load_5m`, `used_bytes`, `total_bytes`."""
        info = self.info()
        load_1m, load_5m, _ = psutil.getloadavg()
        used_bytes = info.total_bytes - info.free_bytes
        return Telemetry(
            values={"load_1m": load_1m, "load_5m": load_5m, "used_bytes": used_bytes, "total_bytes": info.total_bytes}
        )

    def limit_memory(self, limit_bytes: int) -> None:
        """Make allocations fail that would take this process's private memory, including what it holds now, beyond the limit.

        The limit cannot be raised again. Processes started later, such as data-loading workers, inherit it, each for
        itself.

        Raises:
            DeviceError: the process already holds more.
        """
        _start_compute_threads()
        held_bytes = _own_memory().data_bytes
        if held_bytes > limit_bytes:
            raise DeviceError(
                f"a memory limit of {format_bytes(limit_bytes)} is below the {format_bytes(held_bytes)} that the "
                "process holds before training starts; raise --memory-limit"
            )
        mapped_bytes = handed_over.mapped_bytes()
        self._limit_bytes = bound_private_memory(limit_bytes + mapped_bytes) - mapped_bytes

    def start_measuring(self) -> None:
        """Measure contention and energy from now on."""
        self._watch = ProcessorWatch()
        self._energy = rapl.EnergyWatch()

    def peak_bytes(self) -> int:
        """Peak of this process's private memory, plus the most that its data-loading workers were seen to hold.

        Workers are observed whenever this or `current_bytes` is called. Their peak need not coincide with the
        process's.
        """
        self._look_at_workers()
        return _own_memory().peak_data_bytes(self._limit_bytes) + self._workers_peak_bytes

    def current_bytes(self) -> int:
        """Private memory of this process and its workers now."""
        return _own_memory().data_bytes + self._look_at_workers()

    def kept_bytes(self) -> int:
        """The same without what this process's heap holds free."""
        return self.current_bytes() - linux.free_heap_bytes()

    def outside_bytes(self) -> int:
        """Private memory of this process now, with its compute threads: their stacks are not a model's."""
        _start_compute_threads()
        return self.current_bytes()

    def held_bytes(self, attempted_bytes: int) -> int:
        """Private memory of this process and its workers now, or what must have been held for the limit to be hit.

        The failed operator has already freed its own memory. But its allocation exceeded the limit, so at least the limit
        less the attempted bytes was held before.
        """
        by_limit_bytes = 0 if self._limit_bytes is None else self._limit_bytes - attempted_bytes
        return max(self.current_bytes(), by_limit_bytes)

    def memory_detail(self) -> dict[str, float]:
        """Bytes: `vm_data_bytes`, `rss_anon_bytes` (touched), `rss_anon_peak_bytes`, `shared_bytes`, `workers_bytes`
        (peak).

        No limit covers `shared_bytes`, the shared memory in which workers pass batches.
        """
        memory = _own_memory()
        self._look_at_workers()
        return {
            "vm_data_bytes": memory.data_bytes,
            "rss_anon_bytes": memory.touched_bytes,
            "rss_anon_peak_bytes": memory.peak_touched_bytes,
            "shared_bytes": memory.shared_bytes,
            "workers_bytes": self._workers_peak_bytes,
        }

    def contention(self) -> float:
        """Share of the wall time since `start_measuring` in which others held the processors this process wanted."""
        return self._watch.share(num_threads())

    def why_no_energy(self) -> str:
        """Why the processors' energy cannot be read, and what would help; empty where it can."""
        return rapl.why_unreadable()

    def energy_j(self) -> dict[str, float]:
        """Joules of all sockets and their memory since `start_measuring`, whichever process used them."""
        return self._energy.energy_j()

    def own_work(self) -> float:
        """Share of all processors' work since `start_measuring` that this process and its children did."""
        return self._watch.own_work()

    def _is_scarce(self) -> bool:
        """Whether the process stands at its limit, or the kernel has killed a process of the group for memory."""
        if linux.kernel_oom_kills() > self._oom_kills:
            return True
        if self._limit_bytes is None:
            return False
        left_bytes = self._limit_bytes - _own_memory().peak_data_bytes(self._limit_bytes)
        return left_bytes < max(_AT_LIMIT_BYTES, _AT_LIMIT_SHARE * self._limit_bytes)

    def _look_at_workers(self) -> int:
        held_bytes = linux.descendants_private_bytes()
        self._workers_peak_bytes = max(self._workers_peak_bytes, held_bytes)
        return held_bytes


def _own_memory() -> linux.ProcessMemory:
    """This process's memory without what a Task built in Python handed over, which the user's process holds."""
    return linux.process_memory(handed_over.mapped_bytes())


def bound_private_memory(limit_bytes: int) -> int:
    """Make allocations fail beyond a limit, in this process and those it starts. Returns the limit, which an earlier one may lower."""
    import resource  # only Linux bounds private memory by it

    _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    if hard_bytes != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return limit_bytes


def bound_host_memory() -> int:
    """Bound this process, which trains nothing, to what the host or its control group has free, less a reserve.

    Beyond it an allocation fails, before the machine runs out of memory. Only Linux can bound a process so; elsewhere nothing is
    bounded.

    Returns:
        Bytes that the process may take from now on.
    """
    device = CpuDevice()
    free_bytes = device.info().free_bytes
    allowed_bytes = max(free_bytes - _RESERVE_BYTES, int(_LEAST_SHARE * free_bytes))
    if sys.platform != "linux":
        return allowed_bytes
    held_bytes = device.current_bytes()
    device.limit_memory(held_bytes + allowed_bytes)
    return max(0, (device._limit_bytes or 0) - held_bytes)  # a hard limit may leave less


def num_threads() -> int:
    """Compute threads of torch in this process: what torch says if it is loaded, else what it will choose.

    torch takes MKL_NUM_THREADS or OMP_NUM_THREADS, or else one thread for each physical core that the process may run on.
    In builds for x86, MKL allows no more threads than cores.
    """
    if (torch := torch_if_imported()) is not None:
        return int(torch.get_num_threads())
    num_cores = _num_physical_cores()
    for variable in THREAD_VARIABLES:
        first = os.environ.get(variable, "").split(",")[0].strip()
        if first.isdigit() and int(first) > 0:
            return min(int(first), num_cores) if platform.machine() == "x86_64" else int(first)
    return num_cores


def _num_physical_cores() -> int:
    if sys.platform != "linux":
        return psutil.cpu_count(logical=False) or 1
    return len(linux.cores(processors()))


def processor_model() -> str:
    """The processor's model name, as in `/proc/cpuinfo`, else its architecture."""
    lines = linux.read(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _start_compute_threads() -> None:
    """Start torch's threads with a small parallel operation, before a limit is set or what the process holds is read.

    Their stacks count towards both, and the OpenMP library ends the process when it cannot start a thread.
    """
    elements_per_thread = 2**15  # below this torch does not share the work out
    torch.ones(2 * elements_per_thread * torch.get_num_threads(), dtype=torch.uint8)
