"""The kinds of device that memory is predicted for. Devices are of one kind if their kernels allocate alike."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.device import DeviceInfo

Target = str  # torch's name of the type, with the compute capability and the number of multiprocessors as far as they are known

FLASH_CAPABILITY = (8, 0)
_TYPICAL_CAPABILITY, _TYPICAL_MULTIPROCESSORS = (8, 0), 108  # an A100's
# by compute capability; 2048 for others (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")
_MAX_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """What decides how much memory the kernels of a GPU allocate.

    Attributes:
        capability: CUDA compute capability.
        num_multiprocessors: streaming multiprocessors.
    """

    capability: tuple[int, int] = _TYPICAL_CAPABILITY
    num_multiprocessors: int = _TYPICAL_MULTIPROCESSORS

    @property
    def threads_per_multiprocessor(self) -> int:
        """The most threads that can be resident on one."""
        return _MAX_THREADS.get(self.capability, 2048)

    @property
    def has_flash_attention(self) -> bool:
        """Whether torch's flash attention runs on it."""
        return self.capability >= FLASH_CAPABILITY


def target_of(device: DeviceInfo) -> Target:
    """The kind of a device. A GPU of unknown compute capability counts as an A100."""
    if device.capability <= (0, 0):
        return device.kind
    return f"{device.kind} {device.capability[0]}.{device.capability[1]} {device.num_multiprocessors}"


def kind_of(target: Target) -> str:
    """torch's name of the type of devices that a target stands for."""
    return target.partition(" ")[0]


def gpu_of(target: Target) -> GpuKind:
    """The GPU that a target stands for."""
    _, *known = target.split()
    if not known:
        return GpuKind()
    capability, number = known
    major, minor = map(int, capability.split("."))
    return GpuKind(capability=(major, minor), num_multiprocessors=int(number) or _TYPICAL_MULTIPROCESSORS)
