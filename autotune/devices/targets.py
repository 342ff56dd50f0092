"""The kinds of device that memory is predicted for. Devices are of one kind if their kernels allocate alike."""

from __future__ import annotations

from typing import Literal

from autotune.records.device import DeviceInfo

CPU: Literal["cpu"] = "cpu"
CUDA: Literal["cuda"] = "cuda"
OLD_CUDA: Literal["cuda before 8.0"] = "cuda before 8.0"  # without flash attention
Target = Literal["cpu", "cuda", "cuda before 8.0"]

FLASH_CAPABILITY = (8, 0)


def target_of(device: DeviceInfo) -> Target:
    """The kind of a device. A GPU of unknown compute capability counts as a new one."""
    if device.kind == "cpu":
        return CPU
    return OLD_CUDA if (0, 0) < device.capability < FLASH_CAPABILITY else CUDA
