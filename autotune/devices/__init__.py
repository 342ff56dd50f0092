"""The devices to train on, behind one protocol. Opening one creates no CUDA context and imports no torch."""

from __future__ import annotations

import re
import sys
from importlib import metadata, util
from pathlib import Path

from autotune.devices import nvml
from autotune.devices.base import Device, Telemetry
from autotune.devices.cpu import CpuDevice
from autotune.devices.cuda import CudaDevice
from autotune.errors import DeviceError
from autotune.records.device import DeviceInfo

__all__ = ["Device", "DeviceInfo", "Telemetry", "available", "open_device"]


def available() -> list[Device]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in CUDA's order, then the CPU."""
    gpus: list[Device] = [CudaDevice(index) for index in range(_num_gpus())]
    return [*gpus, _cpu(num_gpus=len(gpus))]


def open_device(name: str) -> Device:
    """The device of that name.

    Args:
        name: `cpu`, `cuda` (the first GPU), `cuda:1`, or `auto`: the first GPU where there is one and the installed
            torch can use it (if it cannot, the CPU's notes say so), else the CPU.

    Raises:
        DeviceError: there is no such device, or the installed torch cannot use it.
    """
    if name == "cpu":
        return _cpu(num_gpus=0)
    num_gpus = _num_gpus()
    if name == "auto":
        return CudaDevice(0) if num_gpus and torch_has_cuda() else _cpu(num_gpus=num_gpus)
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise DeviceError(f"{name!r} is not a device; expected one of auto, {_listed(num_gpus)}")
    index = int(match[1] or 0)
    if not num_gpus:
        raise DeviceError(f"there is no device {name!r}: {nvml.why_no_gpu()}; use --device cpu to train on the CPU")
    if index >= num_gpus:
        raise DeviceError(f"there is no device {name!r}; this machine has {_listed(num_gpus)}")
    if not torch_has_cuda():
        raise DeviceError(f"the device {name!r} cannot be used: {_no_cuda_build()}")
    return CudaDevice(index)


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA. Does not import it."""
    if "torch" in sys.modules:
        return sys.modules["torch"].version.cuda is not None
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = (Path(spec.origin).parent / "version.py").read_text()
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def _cpu(*, num_gpus: int) -> CpuDevice:
    return CpuDevice(notes=(f"the GPU is not used: {_no_cuda_build()}",) if num_gpus and not torch_has_cuda() else ())


def _num_gpus() -> int:
    connection = nvml.connect()
    return len(connection.visible_gpus()) if isinstance(connection, nvml.Nvml) else 0


def _no_cuda_build() -> str:
    return (
        f"the installed torch {metadata.version('torch')} was built without CUDA; install a CUDA build "
        "(https://pytorch.org/get-started/locally)"
    )


def _listed(num_gpus: int) -> str:
    return ", ".join(["cpu", *(f"cuda:{index}" for index in range(num_gpus))])
