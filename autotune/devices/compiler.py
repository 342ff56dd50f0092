"""What `torch.compile` needs of a machine: a compiler that makes host code, Python's headers, and Triton for a GPU."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.devices.base import Device

_TRITON_CAPABILITY = (7, 0)
# inductor compiles a CPU's kernels by the one, Triton what launches a GPU's by the other: what for, the variable, the usual names
_ON_CPU = "a C++ compiler on a CPU", "CXX", ("g++",)
_ON_GPU = "a C compiler on a GPU, for what launches the kernels", "CC", ("gcc", "clang")


def why_not_on(device: Device) -> str:
    """Why there is no compiling for a device; empty where there is."""
    if not device.capabilities.triton:
        return _no_compiler(*_ON_CPU)
    return _no_triton(device.info().capability) or _no_compiler(*_ON_GPU)


def _no_compiler(what: str, variable: str, usual: tuple[str, ...]) -> str:
    commands = (os.environ[variable],) if variable in os.environ else usual
    if not any(map(shutil.which, commands)):
        return f"torch.compile needs {what}, and there is no {' or '.join(commands)}; install one, or name one in {variable}"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"torch.compile needs Python's headers, and there is no {header}; install python3-dev"
    return ""


def _no_triton(capability: tuple[int, int]) -> str:
    if find_spec("triton") is None:
        return "torch.compile needs triton on a GPU, which is not installed"
    if (0, 0) < capability < _TRITON_CAPABILITY:
        return f"torch.compile needs compute capability 7.0, this GPU has {capability[0]}.{capability[1]}"
    return ""
