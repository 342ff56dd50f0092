"""Stands for a GPU, to find out what would apply to it without it. The work runs on the CPU."""

from __future__ import annotations

from autotune.devices import capabilities_of
from autotune.devices.cpu import CpuDevice
from autotune.devices.cuda import TYPICAL_CONTEXT_BYTES
from autotune.lazy import torch
from autotune.records.device import DeviceInfo


class AbsentGpu(CpuDevice):
    """A device known only by its description.

    Nothing can be measured on it. A process on it is assumed to hold as much as a typical CUDA context.

    Args:
        info: its type, memory and compute capability.
    """

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__()
        self.name = self.kind = info.kind
        self.capabilities = capabilities_of(info.kind)
        self._info = info

    def info(self) -> DeviceInfo:
        """The description."""
        return self._info

    @property
    def torch_device(self) -> torch.device:
        """The CPU, where the work runs."""
        return torch.device("cpu")

    def current_bytes(self) -> int:
        """Memory of a typical CUDA context and its libraries."""
        return TYPICAL_CONTEXT_BYTES
