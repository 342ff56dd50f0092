"""The devices to train on, behind one protocol. To open one creates no CUDA context in this process and imports no torch."""

from __future__ import annotations

import re
import sys
from importlib import metadata, util
from pathlib import Path

from autotune.devices import nvml
from autotune.devices.base import Capabilities, Device, Telemetry
from autotune.devices.cpu import CpuDevice
from autotune.devices.cuda import CudaDevice
from autotune.devices.instruments import ask_torch, is_there_a_sign_of_a_gpu
from autotune.errors import DeviceError
from autotune.lazy import torch_if_imported
from autotune.records.device import DeviceInfo
from autotune.records.options import ONE_DEVICE, machines_in

__all__ = [
    "HIDDEN",
    "TYPES",
    "Capabilities",
    "Device",
    "DeviceInfo",
    "Telemetry",
    "available",
    "capabilities_of",
    "device_named",
    "name_devices",
    "open_device",
    "require_linux",
]

TYPES: dict[str, type[CpuDevice | CudaDevice]] = {each.kind: each for each in (CpuDevice, CudaDevice)}
# environment variables of a process that is to see only the CPU
HIDDEN = {each.capabilities.chosen_by: "" for each in TYPES.values() if each.capabilities.chosen_by}


def available() -> list[Device]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, in CUDA's order, then the CPU."""
    gpus: list[Device] = [CudaDevice(index) for index in range(_num_gpus())]
    return [*gpus, _cpu(num_gpus=len(gpus))]


def open_device(name: str) -> Device:
    """The device of that name.

    Args:
        name: `cpu`, `cuda` (the first GPU), `cuda:1`, or `auto`: the first GPU where there is one and the installed
            torch can use it, else the CPU. If torch cannot use it, or there is a sign of a GPU that neither NVML nor torch
            finds, the CPU's notes say so.

    Raises:
        DeviceError: there is no such device, or the installed torch cannot use it.
    """
    if name == "cpu":
        return CpuDevice()
    num_gpus = _num_gpus()
    if name == "auto":
        return CudaDevice(0) if num_gpus and torch_has_cuda() else _cpu(num_gpus=num_gpus)
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise DeviceError(f"{name!r} is not a device; expected one of auto, {_listed(num_gpus)}")
    index = int(match[1] or 0)
    if not num_gpus:
        why = _why_not_used() or nvml.why_no_gpu()
        raise DeviceError(f"there is no device {name!r}: {why}; use --device cpu to train on the CPU")
    if index >= num_gpus:
        why = nvml.why_fewer_gpus()
        raise DeviceError(f"there is no device {name!r}; this machine has {_listed(num_gpus)}{why and f': {why}'}")
    if not torch_has_cuda():
        raise DeviceError(f"the device {name!r} cannot be used: {_why_not_used(num_gpus)}")
    return CudaDevice(index)


def name_devices(devices: str, device: str = "auto") -> tuple[str, ...]:
    """The names of the devices that train together, one for each process.

    Args:
        devices: a number of devices, `all`, or their names: `cuda:0,1`, or `cpu:2` for two processes on the CPU.
        device: the kind of device that a number counts, as `open_device` takes it; for `devices` "1" the device itself.

    Raises:
        DeviceError: there are not so many devices, or one is named twice.
    """
    if devices == ONE_DEVICE:
        return (device,)
    if machines_in(devices):
        raise DeviceError(
            f"--devices {devices} are those of several machines, and this is one; expected a number, all, cuda:0,1 or cpu:2. A search "
            f"takes {devices} where its --runner has several"
        )
    named = re.fullmatch(r"(?:(cpu|cuda):(?=\d)|(?=\d+\Z))(\d+(?:,\d+)*)|all", devices)
    if named is None:
        raise DeviceError(f"--devices {devices} names no devices; expected a number, all, cuda:0,1 or cpu:2")
    if not named[1] and ":" in device:
        raise DeviceError(f"--devices {devices} counts devices, and --device {device} names one; leave one of them out")
    kind, numbers = named[1] or open_device(device).kind, named[2]
    if named[1] and device not in ("auto", kind):
        raise DeviceError(f"--devices {devices} and --device {device} contradict each other; leave one of them out")
    if kind == CpuDevice.kind:
        if numbers is None or "," in numbers or numbers == "0":
            raise DeviceError(f"{devices!r} names no processes on the CPU; say how many: cpu:2")
        return (CpuDevice.kind,) * int(numbers)
    indices = [*(map(int, numbers.split(",")) if named[1] else range(_num_gpus() if numbers is None else int(numbers)))]
    if not indices:
        raise DeviceError(f"--devices {devices} names no device; expected at least one")
    if len({*indices}) < len(indices):
        raise DeviceError(f"--devices {devices} names a device twice; name each once, such as cuda:0,1")
    return tuple(open_device(f"{kind}:{index}").name for index in indices)


def require_linux() -> None:
    """Raise DeviceError on a system where a process that trains cannot be given a memory limit."""
    if sys.platform != "linux":
        raise DeviceError(
            f"each config is trained in a process of its own with a memory limit, by facilities of Linux that this system "
            f"({sys.platform}) lacks; run it on Linux, in a Linux container, or in WSL 2 on Windows. Here `autotune predict` "
            "says what fits, and `show`, `report`, `compare` and `export` read the study of another machine"
        )


def device_named(name: str) -> Device:
    """The device by the name that `open_device` gave it. GPUs are not counted here, because that can initialise the driver."""
    return CpuDevice() if name == "cpu" else CudaDevice(int(name.removeprefix("cuda:")))


def capabilities_of(name: str) -> Capabilities:
    """What a device, given by its name, or a target (`autotune.devices.targets`) can do: both begin with torch's name of the type."""
    return TYPES[re.split("[: ]", name)[0]].capabilities


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA, or with ROCm, which it shows as CUDA. Does not import torch."""
    if (torch := torch_if_imported()) is not None:
        return torch.version.cuda is not None or torch.version.hip is not None
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    return re.search(r"^(?:cuda|hip)\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def _cpu(*, num_gpus: int) -> CpuDevice:
    """The CPU where the user did not choose it; with a note if there is a GPU that cannot be used."""
    return CpuDevice(notes=(f"the GPU is not used: {why}",) if (why := _why_not_used(num_gpus)) else ())


def _num_gpus() -> int:
    """How many GPUs CUDA shows, by NVML, or by torch where NVML is missing."""
    connection = nvml.connect()
    if isinstance(connection, nvml.Nvml):
        return len(connection.visible_gpus())
    if not torch_has_cuda() or not is_there_a_sign_of_a_gpu():
        return 0
    torch = torch_if_imported()
    return len(ask_torch().gpus) if torch is None else int(torch.cuda.device_count())


def _why_not_used(num_gpus: int = 0) -> str:
    """Why the machine's GPU, or one that there is a sign of, cannot be trained on; empty where it can, or there is none."""
    if not num_gpus and (isinstance(nvml.connect(), nvml.Nvml) or not is_there_a_sign_of_a_gpu()):
        return ""
    if not torch_has_cuda():
        return (
            f"the installed torch {metadata.version('torch')} was built without CUDA; install a CUDA build "
            "(https://pytorch.org/get-started/locally)"
        )
    return "" if num_gpus else f"{nvml.why_no_gpu()}, and torch finds none ({ask_torch().why or 'it does not say why'})"


def _listed(num_gpus: int) -> str:
    return ", ".join(["cpu", *(f"cuda:{index}" for index in range(num_gpus))])
