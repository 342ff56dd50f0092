"""A device, and where on it jobs run: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.formats import Record


def same_memory(first_bytes: int, second_bytes: int) -> bool:
    """Whether two readings of a total memory can be of one device: a kernel keeps some pages more or less at each boot."""
    return abs(first_bytes - second_bytes) <= 0.01 * max(first_bytes, second_bytes)


@dataclass(frozen=True, kw_only=True)
class DeviceInfo(Record):
    """A device as plain data.

    Attributes:
        name: as the user writes it: `cpu`, `cuda:0`.
        model: the hardware's name, e.g. `NVIDIA H200` or the processor's model name.
        total_bytes: memory of the device (on a CPU: of the machine or its cgroup, whichever is smaller).
        free_bytes: what a new process may take now.
        num_threads: compute threads torch uses on a CPU; 0 on a GPU.
        driver: GPU driver version; empty on a CPU.
        capability: CUDA compute capability, (0, 0) on a CPU.
        num_multiprocessors: streaming multiprocessors of a GPU, 0 on a CPU and where it is not known.
        torch_version: the torch that measures.
        power_limit_w: of a GPU, enforced now; 0 where it is not known.
    """

    name: str
    model: str
    total_bytes: int
    free_bytes: int
    num_threads: int = 0
    driver: str = ""
    capability: tuple[int, int] = (0, 0)
    num_multiprocessors: int = 0
    torch_version: str = ""
    power_limit_w: float = 0.0
    notes: tuple[str, ...] = ()  # warnings, e.g. other processes on the GPU

    @property
    def kind(self) -> str:
        """torch's name of its type; what the type can do: `autotune.devices.capabilities_of`."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Slot(Record):
    """A place for one job at a time.

    Attributes:
        name: as its runner calls it, no two of its slots alike: `cpu`, `cuda:1`.
        device: that a job trains on there, as it is now.
    """

    name: str
    device: DeviceInfo
