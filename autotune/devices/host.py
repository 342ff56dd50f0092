"""The host's memory for a process that trains nothing: its allocations fail before the machine has none left."""

from __future__ import annotations

import sys

from autotune.devices.cpu import CpuDevice
from autotune.units import GIB

RESERVE_BYTES = 1 * GIB  # left to everybody else, and to the kernel, which kills where nothing is left
LEAST_SHARE = 0.5  # of what is free, where that is little


def bound_host_memory() -> int:
    """Let this process take what the host or its control group has free, less a reserve, and no more.

    What would take more raises a failed allocation. Linux alone bounds a process so; elsewhere nothing is bounded.

    Returns:
        Bytes that it may take from now on.
    """
    device = CpuDevice()
    free_bytes = device.info().free_bytes
    allowed_bytes = max(free_bytes - RESERVE_BYTES, int(LEAST_SHARE * free_bytes))
    if sys.platform != "linux":
        return allowed_bytes
    import resource

    held_bytes = device.current_bytes()
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    if hard_bytes != resource.RLIM_INFINITY:
        allowed_bytes = min(allowed_bytes, max(0, hard_bytes - held_bytes))
    device.limit_memory(held_bytes + allowed_bytes)
    return allowed_bytes
