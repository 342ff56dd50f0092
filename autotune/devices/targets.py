"""The kinds of device that memory is predicted for. Devices are of one kind if their kernels allocate alike."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.device import DeviceInfo

Target = str  # `cpu`, or `cuda` with the compute capability and the number of multiprocessors, as far as they are known
CPU: Target = "cpu"
CUDA: Target = "cuda"

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
    if device.kind == "cpu":
        return CPU
    if device.capability <= (0, 0):
        return CUDA
    return f"{CUDA} {device.capability[0]}.{device.capability[1]} {device.num_multiprocessors}"


def gpu_of(target: Target) -> GpuKind:
    """The GPU that a target other than the CPU stands for."""
    if target == CUDA:
        return GpuKind()
    _, capability, number = target.split()
    major, minor = map(int, capability.split("."))
    return GpuKind(capability=(major, minor), num_multiprocessors=int(number) or _TYPICAL_MULTIPROCESSORS)
