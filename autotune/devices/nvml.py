"""Reads GPUs through NVIDIA's management library (NVML), which creates no CUDA context.

Every reading is optional: one that the driver or the GPU does not support is missing.

Numbers and names follow the NVML API reference (https://docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.devices import linux
from autotune.devices.base import Telemetry

_TEMPERATURE_GPU = 0
_CLOCK_SM = 1
# bits of nvmlDeviceGetCurrentClocksEventReasons that mean a clock lower than asked for; those for idle, application clocks and
# sync boost do not
_SLOWDOWNS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
_SEVERAL_INSTANCES = 570  # the first driver whose CUDA shows a process more than one MIG instance
_NVLINK = 2  # index of NVML_P2P_CAPS
_MOST_LINKS = 36  # NVLinks of a GPU
# nvmlDeviceGetTopologyCommonAncestor: what lies between two GPUs
_PATHS = {
    0: "on one board",
    10: "over one PCIe switch",
    20: "over PCIe switches",
    30: "over PCIe and the processor",
    40: "over PCIe and a processor's inner links",
    50: "over PCIe and the link between processors",
}
# compute capabilities whose multiprocessors have 64 FP32 cores (CUDA C++ Programming Guide, "Arithmetic Instructions"); the others have 128
_WITH_64_CORES = {(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, or a MIG instance of one, as CUDA may see it.

    Attributes:
        handle: NVML's handle; None for a GPU that has fallen off the bus, which only keeps its place among the others.
        board: handle of the physical GPU, which has the instruments; without MIG the same as `handle`.
        uuids: its own UUID and its board's, without prefixes: CUDA may name it by either.
    """

    handle: Any
    board: Any
    uuid: str
    uuids: tuple[str, ...]
    name: str
    is_mig: bool = False


class Nvml:
    """A connection to the driver.

    Args:
        module: `pynvml`, as nvidia-ml-py provides it.

    Raises:
        Exception: whatever the module raises if there is no driver, or one that it does not know.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        module.nvmlInit()

    def driver(self) -> str:
        """The driver's version."""
        return _text(self._read("nvmlSystemGetDriverVersion"))

    def boards(self) -> list[Gpu]:
        """Every physical GPU, in PCI order; one that is lost keeps its place."""
        boards = []
        for index in range(int(self._read("nvmlDeviceGetCount") or 0)):
            try:
                handle = self._module.nvmlDeviceGetHandleByIndex(index)
            except Exception as error:
                if _says_lost(error):
                    boards.append(Gpu(handle=None, board=None, uuid=f"lost {index}", uuids=(), name=""))
            else:
                boards.append(self._describe(handle, handle))
        return boards

    def differ(self) -> bool:
        """Whether CUDA may number the GPUs in another order than NVML: where GPUs differ, it puts the fastest first."""
        if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
            return False
        seen = self.boards(), self.visible_gpus()  # a part of a GPU is slower than another whole
        return any(len({gpu.name for gpu in gpus if gpu.handle is not None}) > 1 for gpus in seen)

    def visible_gpus(self, environment: Mapping[str, str] = os.environ) -> list[Gpu]:
        """The GPUs that CUDA shows under CUDA_VISIBLE_DEVICES (indices, or the beginnings of UUIDs), in its order.

        As in CUDA, the list ends before the first invalid entry, and is empty if an entry is repeated. What CUDA shows of GPUs that
        are divided by MIG depends on the driver (MIG User Guide, "CUDA Device Enumeration"): before 570 one instance, the first, and
        nothing beside it; since then one compute instance of each GPU instance, and whole GPUs.
        """
        chosen = self._chosen(environment)
        instances = [gpu for gpu in chosen if gpu.is_mig]
        if instances and self._shows_one_instance():
            return instances[:1]
        shown: dict[object, Gpu] = {}
        for gpu in chosen:
            number = self._read("nvmlDeviceGetGpuInstanceId", gpu.handle) if gpu.is_mig else None
            shown.setdefault(gpu.uuid if number is None else (gpu.uuids[1], number), gpu)
        return [*shown.values()]

    def why_fewer(self, environment: Mapping[str, str] = os.environ) -> str:
        """Why CUDA shows fewer GPUs than CUDA_VISIBLE_DEVICES leaves; empty where it shows them all."""
        if len(self._chosen(environment)) == len(self.visible_gpus(environment)):
            return ""
        if self._shows_one_instance():
            return (
                f"the driver {self.driver()} shows a process one MIG instance and no other GPU; drivers from {_SEVERAL_INSTANCES} on show "
                "several, and CUDA_VISIBLE_DEVICES chooses which it is"
            )
        return "the driver shows a process one compute instance of each GPU instance (MIG)"

    def _shows_one_instance(self) -> bool:
        return int(self.driver().partition(".")[0] or 0) < _SEVERAL_INSTANCES

    def _chosen(self, environment: Mapping[str, str]) -> list[Gpu]:
        """What CUDA_VISIBLE_DEVICES leaves: whole GPUs, and MIG instances in place of GPUs that are divided."""
        boards = self.boards()
        wanted = environment.get("CUDA_VISIBLE_DEVICES")
        if wanted is None:
            return [gpu for board in boards for gpu in self._instances(board) or [board]]
        chosen: list[Gpu] = []
        for entry in (part.strip() for part in wanted.split(",")):
            if entry.startswith("MIG-"):
                matches = [gpu for board in boards for gpu in self._instances(board) if gpu.uuid.startswith(entry)]
            elif entry.startswith("GPU-"):
                matches = [self._first_instance(board) for board in boards if board.uuid.startswith(entry)]
            elif entry.isdigit() and int(entry) < len(boards):
                matches = [self._first_instance(boards[int(entry)])]
            else:
                matches = []
            if len(matches) != 1:
                break
            if matches[0].uuid in (gpu.uuid for gpu in chosen):
                return []
            chosen += matches
        return chosen

    def memory(self, gpu: Gpu) -> tuple[int, int] | None:
        """(used, total) bytes of the whole GPU, all processes together."""
        memory = self._read("nvmlDeviceGetMemoryInfo", gpu.handle)
        return None if memory is None else (int(memory.used), int(memory.total))

    def capability(self, gpu: Gpu) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) if unknown."""
        major, minor = self._read("nvmlDeviceGetCudaComputeCapability", gpu.board) or (0, 0)
        return int(major), int(minor)

    def num_multiprocessors(self, gpu: Gpu) -> int:
        """Streaming multiprocessors of a GPU or of a MIG instance; 0 if unknown."""
        if gpu.is_mig:
            attributes = self._read("nvmlDeviceGetAttributes_v2", gpu.handle)
            return int(attributes.multiprocessorCount) if attributes is not None else 0
        num_cores = int(self._read("nvmlDeviceGetNumGpuCores", gpu.board) or 0)
        return num_cores // (64 if self.capability(gpu) in _WITH_64_CORES else 128)

    def path(self, one: Gpu, other: Gpu) -> str:
        """How two GPUs reach each other, in words; empty where the driver does not say."""
        if self._read("nvmlDeviceGetP2PStatus", one.board, other.board, _NVLINK) == 0:
            links = sum(self._read("nvmlDeviceGetNvLinkState", one.board, link) == 1 for link in range(_MOST_LINKS))
            return f"over NVLink ({links} links)" if links else "over NVLink"
        return _PATHS.get(self._read("nvmlDeviceGetTopologyCommonAncestor", one.board, other.board), "")

    def is_lost(self, gpu: Gpu) -> bool:
        """Whether the driver says that the GPU is gone."""
        if gpu.handle is None:
            return True
        try:
            self._module.nvmlDeviceGetMemoryInfo(gpu.handle)
        except Exception as error:
            return _says_lost(error)
        return False

    def bus_id(self, gpu: Gpu) -> str:
        """Where the GPU is on the PCI bus, `00000000:3B:00.0`; empty if unknown."""
        found = self._read("nvmlDeviceGetPciInfo", gpu.board)
        return "" if found is None else _text(found.busId)

    def power_limit_w(self, gpu: Gpu) -> float:
        """Watts that the GPU may draw; 0 if unknown."""
        return _watts(self._read("nvmlDeviceGetEnforcedPowerLimit", gpu.board)) or 0.0

    def energy_j(self, gpu: Gpu) -> float | None:
        """Joules that the whole GPU has used since the driver was loaded; None where it does not count. It moves every 20 to 100 ms."""
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption", gpu.board)
        return None if millijoules is None else millijoules / 1000

    def used_by_process(self, gpu: Gpu) -> dict[int, int | None]:
        """Process number -> bytes that the driver books on it, for each process that computes on the GPU.

        In a container the process numbers may be the host's, or the list may be empty.
        """
        listed = self._read("nvmlDeviceGetComputeRunningProcesses", gpu.handle)
        if listed is None:  # a driver before 510 knows the call by its older name
            listed = self._read("nvmlDeviceGetComputeRunningProcesses_v2", gpu.handle) or ()
        booked = {int(entry.pid): entry.usedGpuMemory for entry in listed}
        return {pid: None if used is None else int(used) for pid, used in booked.items()}

    def utilization_by_process(self, gpu: Gpu, since_us: int) -> dict[int, float]:
        """Share of the multiprocessors' time (0 to 1) that each process took since `since_us`; empty where not supported.

        Args:
            gpu: the GPU.
            since_us: microseconds since the epoch.
        """
        samples: dict[int, list[float]] = {}
        for sample in self._read("nvmlDeviceGetProcessUtilization", gpu.handle, since_us) or ():
            if sample.smUtil <= 100:  # some drivers give numbers without a meaning
                samples.setdefault(int(sample.pid), []).append(sample.smUtil / 100)
        return {pid: sum(values) / len(values) for pid, values in samples.items()}

    def telemetry(self, gpu: Gpu, *, without: frozenset[int] = frozenset()) -> Telemetry:
        """Read every instrument the GPU has.

        Args:
            gpu: the GPU.
            without: process ids that do not count as other processes.
        """
        utilization = self._read("nvmlDeviceGetUtilizationRates", gpu.board)
        used_bytes, total_bytes = self.memory(gpu) or (None, None)
        readings = {
            "gpu_utilization": None if utilization is None or gpu.is_mig else utilization.gpu,
            "memory_utilization": None if utilization is None or gpu.is_mig else utilization.memory,
            "used_bytes": used_bytes,
            "total_bytes": total_bytes,
            "temperature_c": self._read("nvmlDeviceGetTemperature", gpu.board, _TEMPERATURE_GPU),
            "power_w": _watts(self._read("nvmlDeviceGetPowerUsage", gpu.board)),
            "power_limit_w": self.power_limit_w(gpu) or None,
            "sm_clock_mhz": self._read("nvmlDeviceGetClockInfo", gpu.board, _CLOCK_SM),
        }
        return Telemetry(
            values={name: float(value) for name, value in readings.items() if value is not None},
            throttle_reasons=self.throttle_reasons(gpu),
            processes=tuple(
                (pid, used_bytes or 0, self._process_name(pid))
                for pid, used_bytes in self.used_by_process(gpu).items()
                if pid not in without
            ),
        )

    def throttle_reasons(self, gpu: Gpu) -> tuple[str, ...]:
        """Why the clock is lower than asked for now, in words."""
        bits = self._read("nvmlDeviceGetCurrentClocksEventReasons", gpu.board)
        if bits is None:  # drivers before 535 know it by this name
            bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons", gpu.board)
        return tuple(words for bit, words in _SLOWDOWNS.items() if int(bits or 0) & bit)

    def _first_instance(self, board: Gpu) -> Gpu:
        return next(iter(self._instances(board)), board)

    def _instances(self, board: Gpu) -> list[Gpu]:
        """The MIG instances of a GPU; none where MIG is off."""
        current, _ = self._read("nvmlDeviceGetMigMode", board.handle) or (0, 0)
        if not current:
            return []
        number = int(self._read("nvmlDeviceGetMaxMigDeviceCount", board.handle) or 0)
        handles = (self._read("nvmlDeviceGetMigDeviceHandleByIndex", board.handle, index) for index in range(number))
        return [self._describe(handle, board.handle) for handle in handles if handle is not None]

    def _describe(self, handle: Any, board: Any) -> Gpu:
        uuid, name = _text(self._read("nvmlDeviceGetUUID", handle)), _text(self._read("nvmlDeviceGetName", handle))
        is_mig = uuid.startswith("MIG-")
        name = name or _text(self._read("nvmlDeviceGetName", board))
        uuids = uuid, _text(self._read("nvmlDeviceGetUUID", board))
        bare = tuple(known.removeprefix("MIG-").removeprefix("GPU-") for known in uuids)
        return Gpu(handle=handle, board=board, uuid=uuid, uuids=bare, name=name, is_mig=is_mig)

    def _process_name(self, pid: int) -> str:
        name = _text(self._read("nvmlSystemGetProcessName", pid)) or linux.read(Path(f"/proc/{pid}/comm"))
        return os.path.basename(name.split(" ")[0])

    def _read(self, function: str, *arguments: Any) -> Any:
        """Call NVML; None where this driver, GPU or module does not have the function.

        Any exception means that: some that the module raises are no NVMLError (NVMLLibraryMismatchError, say).
        """
        try:
            return getattr(self._module, function)(*arguments)
        except Exception:
            return None


_connections: dict[int, Nvml | str] = {}  # by process number: a connection does not survive a fork


def connect() -> Nvml | str:
    """This process's connection to the driver, or why there is none."""
    pid = os.getpid()
    if pid not in _connections:
        pynvml = importlib.import_module("pynvml")
        try:
            _connections[pid] = Nvml(pynvml)
        except Exception as error:
            absent = type(error).__name__ in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
            why = "no NVIDIA driver is installed" if absent else f"the NVIDIA driver does not answer: {error}"
            _connections[pid] = why
    return _connections[pid]


def why_no_gpu() -> str:
    """Why there is no GPU to use, in words."""
    connection = connect()
    if isinstance(connection, str):
        return connection
    boards = connection.boards()
    if not boards:
        return "the NVIDIA driver finds no GPU"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU of this machine ({len(boards)})"


def why_fewer_gpus() -> str:
    """Why CUDA shows fewer GPUs than CUDA_VISIBLE_DEVICES leaves, in words; empty where it shows them all, or nothing is known of them."""
    connection = connect()
    return "" if isinstance(connection, str) else connection.why_fewer()


def _says_lost(error: Exception) -> bool:
    return type(error).__name__ == "NVMLError_GpuIsLost"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _watts(milliwatts: Any) -> float | None:
    return None if milliwatts is None else milliwatts / 1000
