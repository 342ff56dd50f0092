"""A GPU that is not there, to ask what would apply to it: the work that this takes is done on the CPU."""

from __future__ import annotations

from autotune.devices.cpu import CpuDevice
from autotune.devices.cuda import TYPICAL_CONTEXT_BYTES
from autotune.records.device import DeviceInfo


class AbsentGpu(CpuDevice):
    """A CUDA device by its description alone.

    Nothing can be measured on it, and a process on it is taken to hold what a typical CUDA context does.

    Args:
        info: what is known of it: its memory and compute capability.
    """

    name = "cuda"
    kind = "cuda"

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__()
        self._info = info

    def info(self) -> DeviceInfo:
        """As it was described."""
        return self._info

    def current_bytes(self) -> int:
        """A typical CUDA context and its libraries."""
        return TYPICAL_CONTEXT_BYTES
