"""Memory limits for the tests: what a process holds once torch is imported depends on torch's build (CUDA's is far larger)."""

import subprocess
import sys
from functools import cache

MIB = 2**20


def limit_bytes(room_mib: int) -> int:
    """A limit that leaves a process on the CPU so much room for training."""
    return held_bytes() + room_mib * MIB


@cache
def held_bytes() -> int:
    """What a new process holds after importing torch, as the CPU's limit counts it."""
    code = "import torch\nfrom autotune.devices.cpu import CpuDevice\nprint(CpuDevice().current_bytes())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
