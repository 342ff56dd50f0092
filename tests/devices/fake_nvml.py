"""A stand-in for the module `pynvml`: GPUs on paper, and errors where the real library has them.

It shows what the driver of `tests/driver` does not: instruments that a GPU lacks, older names of calls, errors that are no
NVMLError, several instances on a board. And how its answers are read is to be tested on machines without gcc or torch's CUDA build.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.devices import nvml

GIB = 2**30


@dataclass
class FakeGpu:
    """A GPU, or a MIG instance; what is None is not supported."""

    uuid: str
    name: str = "NVIDIA H200"
    used_bytes: int = 2 * GIB
    total_bytes: int = 140 * GIB
    utilization: int | None = 37
    temperature_c: int | None = 51
    power_mw: int | None = 312_500
    energy_mj: int | None = None
    reasons: int = 0
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    process_utilization: list[tuple[int, int]] = field(default_factory=list)
    capability: tuple[int, int] = (9, 0)
    instances: list[FakeGpu] = field(default_factory=list)
    board: FakeGpu | None = None
    num_links: int = 0
    ancestor: int | None = None
    bus_id: str | None = None
    lost: bool = False
    gpu_instance: int | None = None


class FakeNvml:
    """The calls that autotune makes, on `gpus`."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_GpuIsLost(NVMLError):
        pass

    def __init__(self, *gpus: FakeGpu, error: Exception | None = None, driver: str = "550.54.15") -> None:
        self.gpus = gpus
        self.error = error
        self.driver = driver
        for gpu in gpus:
            for instance in gpu.instances:
                instance.board = gpu

    def nvmlInit(self) -> None:
        if self.error:
            raise self.error

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return self.driver.encode()

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid >= 10**6:
            raise self.NVMLError("not found")
        return "/usr/bin/python3 train.py"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self._reached(self.gpus[index])

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        self._reached(gpu)
        return SimpleNamespace(used=gpu.used_bytes, total=gpu.total_bytes, free=gpu.total_bytes - gpu.used_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return gpu.capability

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetProcessUtilization(self, gpu: FakeGpu, since_us: int) -> list[Any]:
        if not gpu.process_utilization:
            raise self.NVMLError("not found")
        return [SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in gpu.process_utilization]

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(gpu=self._supported(gpu.utilization), memory=12)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return self._supported(gpu.temperature_c)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return self._supported(gpu.power_mw)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        return self._supported(gpu.energy_mj)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, clock: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return gpu.reasons

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [int(bool(gpu.instances)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.instances):
            raise self.NVMLError("not found")
        return gpu.instances[index]

    def nvmlDeviceGetGpuInstanceId(self, gpu: FakeGpu) -> int:
        return self._supported(gpu.gpu_instance)

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(busId=self._supported(gpu.bus_id))

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, index: int) -> int:
        return 0 if index == 2 and one.num_links and other.num_links else 5

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        return int(link < gpu.num_links)

    def nvmlDeviceGetTopologyCommonAncestor(self, one: FakeGpu, other: FakeGpu) -> int:
        return self._supported(one.ancestor)

    def _reached(self, gpu: FakeGpu) -> FakeGpu:
        if gpu.lost:
            raise self.NVMLError_GpuIsLost("GPU is lost")
        return gpu

    def _supported(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("not supported")
        return value


def install(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, **told: Any) -> None:
    """Make autotune see these GPUs, and no CUDA_VISIBLE_DEVICES. What NVML is `told` is an argument of `FakeNvml`."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*gpus, **told))
    monkeypatch.setattr(nvml, "_connections", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
