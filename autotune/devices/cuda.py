"""A CUDA GPU as a device. `info` and `telemetry` use the driver's management library and create no CUDA context."""

from __future__ import annotations

import os
import sys
import time
from importlib import metadata
from typing import TYPE_CHECKING

from autotune.devices import nvml, oom, procfs
from autotune.devices.base import Telemetry
from autotune.errors import DeviceError
from autotune.records.device import DeviceInfo
from autotune.units import MIB, format_bytes, plural

if TYPE_CHECKING:
    import torch

# a context and its libraries where nothing can measure them; 287 to 667 MB are published
TYPICAL_CONTEXT_BYTES = 512 * MIB
# how near its limit, or the whole card its end, must be to blame memory for a library's failure
_AT_LIMIT_BYTES, _AT_LIMIT_SHARE = 512 * MIB, 0.05


class CudaDevice:
    """One GPU.

    The limit and the peak cover everything that this process has on the card: what torch's allocator has reserved, and
    what lies outside it (the CUDA context, loaded kernels, library handles, buffers of NCCL and the like). The part
    outside is what the driver attributes to this process beyond the reserved bytes. In a container that hides processes
    it is the growth of the whole card's use since before the context. Without NVML it is the growth since the context
    was created, plus a typical context.

    Args:
        index: position among the devices that CUDA_VISIBLE_DEVICES leaves, in CUDA's order.
    """

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self._entered = False
        self._limit_bytes: int | None = None
        self._others_bytes: int | None = None  # on the card before this process's context, where known
        self._outside_peak_bytes = 0
        self._oom_kills = oom.kernel_oom_kills()
        self._measured_since_us = time.time_ns() // 1000

    def info(self) -> DeviceInfo:
        """Describe the GPU now.

        Raises:
            DeviceError: it is not there, or the driver does not answer.
        """
        connection, gpu = self._gpu()
        memory = connection.memory(gpu)
        if memory is None:
            raise DeviceError(f"the driver does not report the memory of {self.name} ({gpu.name}); check nvidia-smi")
        used_bytes, total_bytes = memory
        return DeviceInfo(
            name=self.name,
            model=gpu.name,
            total_bytes=total_bytes,
            free_bytes=max(0, total_bytes - used_bytes),
            driver=connection.driver(),
            capability=connection.capability(gpu),
            torch_version=metadata.version("torch"),
            notes=self._notes(connection, gpu),
        )

    def telemetry(self) -> Telemetry:
        """Read the instruments now; empty if the driver does not answer."""
        try:
            connection, gpu = self._gpu()
        except DeviceError:
            return Telemetry()
        telemetry = connection.telemetry(gpu, without=_own_processes())
        if self._has_context() and self._own_bytes(connection, gpu) is None:
            # process numbers of another namespace: one of these may be this process itself
            telemetry = Telemetry(values=telemetry.values, throttle_reasons=telemetry.throttle_reasons)
        return telemetry

    @property
    def torch_device(self) -> torch.device:
        """The device as torch's own object."""
        import torch

        return torch.device("cuda", self._index)

    def enter(self) -> None:
        """Make this GPU the current one of the process, create a context and load what every training run loads."""
        import torch

        self._enter()
        torch.cuda.set_device(self._index)  # a session on another GPU may have come between

    def limit_memory(self, limit_bytes: int) -> None:
        """Make torch fail allocations beyond what the limit leaves after this process's memory outside the allocator.

        The memory outside is measured now, with a context and cuBLAS loaded. `peak_bytes` shows its later growth.

        Raises:
            DeviceError: the context alone is larger than the limit.
        """
        import torch

        self._enter()
        outside_bytes = self._outside_bytes()
        if outside_bytes >= limit_bytes:
            raise DeviceError(
                f"a memory limit of {format_bytes(limit_bytes)} is below the {format_bytes(outside_bytes)} that CUDA "
                f"itself takes on {self.name} before training starts; raise --memory-limit"
            )
        total_bytes = torch.cuda.get_device_properties(self._index).total_memory
        fraction = min(1.0, (limit_bytes - outside_bytes) / total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, self._index)
        self._limit_bytes = limit_bytes

    def start_measuring(self) -> None:
        """Measure contention from now on. The memory peak is not reset: it covers the whole run."""
        self._measured_since_us = time.time_ns() // 1000

    def synchronize(self) -> None:
        """Wait for all work queued on the GPU."""
        import torch

        torch.cuda.synchronize(self._index)

    def peak_bytes(self) -> int:
        """The most that the allocator has reserved, plus the most seen outside it."""
        import torch

        self._enter()
        self._outside_bytes()
        return torch.cuda.max_memory_reserved(self._index) + self._outside_peak_bytes

    def current_bytes(self) -> int:
        """Live tensors plus what lies outside the allocator.

        Reserved memory would not do: it grows by segments, and hides a leak for a while.
        """
        import torch

        self._enter()
        return torch.cuda.memory_allocated(self._index) + self._outside_bytes()

    def held_bytes(self, attempted_bytes: int) -> int:
        """What the allocator has reserved now, plus what lies outside it.

        Before it raises, the allocator frees its cached blocks, which the peak still counts.
        """
        import torch

        self._enter()
        return torch.cuda.memory_reserved(self._index) + self._outside_bytes()

    def memory_detail(self) -> dict[str, float]:
        """Peaks `allocated_bytes`, `reserved_bytes`, `outside_bytes`; counts `num_alloc_retries`, `num_ooms`."""
        import torch

        self._enter()
        self._outside_bytes()
        statistics = torch.cuda.memory_stats(self._index)
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self._index),
            "reserved_bytes": torch.cuda.max_memory_reserved(self._index),
            "outside_bytes": self._outside_peak_bytes,
            "num_alloc_retries": statistics.get("num_alloc_retries", 0),
            "num_ooms": statistics.get("num_ooms", 0),
        }

    def contention(self) -> float:
        """Share of the GPU's time that other processes took since `start_measuring`; 0 if the driver cannot tell."""
        try:
            connection, gpu = self._gpu()
        except DeviceError:
            return 0.0
        if self._own_bytes(connection, gpu) is None:  # then this process cannot be told from others
            return 0.0
        own = _own_processes()
        shares = connection.utilization_by_process(gpu, self._measured_since_us)
        return min(1.0, sum(share for pid, share in shares.items() if pid not in own))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error`, or anything in its chain, is a real failed allocation, on the card or on the host."""
        return oom.is_out_of_memory(error, scarce=self._is_scarce)

    def _is_scarce(self) -> bool:
        """The process stands at its limit, the card is full, or the kernel has killed a process for memory."""
        import torch

        if oom.kernel_oom_kills() > self._oom_kills:
            return True
        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._index)
            held_bytes = torch.cuda.max_memory_reserved(self._index) + self._outside_bytes()
        except RuntimeError:  # the context is broken; then the error was not about memory alone
            return False
        limit_bytes = self._limit_bytes or total_bytes
        left_bytes = min(free_bytes, limit_bytes - held_bytes)
        return left_bytes < max(_AT_LIMIT_BYTES, _AT_LIMIT_SHARE * limit_bytes)

    def _enter(self) -> None:
        """Create the context and load what every training run loads, once."""
        import torch

        if self._entered:
            return
        if not self._has_context():
            self._others_bytes = self._card_used_bytes()
        torch.cuda.set_device(self._index)
        weight = torch.ones(16, 16, device=self.torch_device, requires_grad=True)
        torch.autograd.backward((weight @ weight).sum())
        torch.cuda.synchronize(self._index)
        del weight
        self._entered = True
        if self._others_bytes is None:
            ours_bytes = TYPICAL_CONTEXT_BYTES + torch.cuda.memory_reserved(self._index)
            self._others_bytes = max(0, (self._card_used_bytes() or 0) - ours_bytes)
        self._outside_bytes()

    def _outside_bytes(self) -> int:
        """What this process has on the card outside torch's allocator now."""
        import torch

        self._enter()
        own_bytes = None
        connection = nvml.connect()
        if isinstance(connection, nvml.Nvml):
            _, gpu = self._gpu()
            own_bytes = self._own_bytes(connection, gpu)
            shared = len(connection.processes(gpu)) > 1
            if own_bytes is None and shared and self._outside_peak_bytes:
                return self._outside_peak_bytes  # the card's growth may be another process's
        if own_bytes is None:
            own_bytes = (self._card_used_bytes() or 0) - (self._others_bytes or 0)
        outside_bytes = max(0, own_bytes - torch.cuda.memory_reserved(self._index))
        self._outside_peak_bytes = max(self._outside_peak_bytes, outside_bytes)
        return outside_bytes

    def _card_used_bytes(self) -> int | None:
        """Memory in use on the card by all processes. Before there is a context, only NVML can tell."""
        connection = nvml.connect()
        if isinstance(connection, nvml.Nvml):
            _, gpu = self._gpu()
            if memory := connection.memory(gpu):
                return memory[0]
        if not self._has_context():
            return None
        free_bytes, total_bytes = sys.modules["torch"].cuda.mem_get_info(self._index)
        return int(total_bytes - free_bytes)

    def _gpu(self) -> tuple[nvml.Nvml, nvml.Gpu]:
        connection = nvml.connect()
        if isinstance(connection, str):
            raise DeviceError(f"{self.name} cannot be described: {connection}; check nvidia-smi")
        gpus = connection.visible_gpus()
        if self._has_context():  # then CUDA itself says which one it is
            properties = sys.modules["torch"].cuda.get_device_properties(self._index)
            uuid = str(getattr(properties, "uuid", ""))
            gpus_by_uuid = [gpu for gpu in connection.boards() + gpus if uuid and gpu.uuid.endswith(uuid)]
            if gpus_by_uuid:
                return connection, gpus_by_uuid[-1]
        if self._index >= len(gpus):
            raise DeviceError(
                f"{self.name} is not there: the driver shows {plural(len(gpus), 'GPU')}; check CUDA_VISIBLE_DEVICES"
            )
        return connection, gpus[self._index]

    def _own_bytes(self, connection: nvml.Nvml, gpu: nvml.Gpu) -> int | None:
        """Memory that the driver attributes to this process; None if it does not list the process."""
        pid = os.getpid()
        return next((process.used_bytes for process in connection.processes(gpu) if process.pid == pid), None)

    def _has_context(self) -> bool:
        return "torch" in sys.modules and bool(sys.modules["torch"].cuda.is_initialized())

    def _notes(self, connection: nvml.Nvml, gpu: nvml.Gpu) -> tuple[str, ...]:
        notes = []
        if others := self.telemetry().processes:
            held_bytes = sum(used_bytes for _, used_bytes, _ in others)
            names = ", ".join(sorted({name for _, _, name in others if name})) or "names unknown"
            number = f"{len(others)} other process{'es hold' if len(others) > 1 else ' holds'}"
            notes.append(f"{number} {format_bytes(held_bytes)} of {self.name} ({names}); they disturb the timing")
        if gpu.is_mig:
            notes.append(
                f"{self.name} is a MIG instance ({gpu.name}): temperature and power are those of the whole GPU"
            )
        in_pci_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if not in_pci_order and len({board.name for board in connection.boards()}) > 1:
            notes.append(
                "the GPUs differ and CUDA numbers the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID to be certain"
            )
        return tuple(notes)


def _own_processes() -> frozenset[int]:
    return frozenset((os.getpid(), *procfs.descendants()))
