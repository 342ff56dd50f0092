"""Stands for a GPU, to find out what would apply to it without it. The work runs on the CPU."""

from __future__ import annotations

from autotune.devices.cpu import CpuDevice
from autotune.devices.cuda import CudaDevice
from autotune.devices.outside import TYPICAL_CONTEXT_BYTES
from autotune.records.device import DeviceInfo


class AbsentGpu(CpuDevice):
    """A CUDA device known only by its description.

    Nothing can be measured on it. A process on it is assumed to hold as much as a typical CUDA context.

    Args:
        info: its memory and compute capability.
    """

    name = "cuda"
    kind = "cuda"
    capabilities = CudaDevice.capabilities

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__()
        self._info = info

    def info(self) -> DeviceInfo:
        """The description."""
        return self._info

    def current_bytes(self) -> int:
        """Memory of a typical CUDA context and its libraries."""
        return TYPICAL_CONTEXT_BYTES
