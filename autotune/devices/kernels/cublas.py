"""Workspaces of cuBLAS that torch takes from its caching allocator and keeps."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from autotune.devices.targets import GpuKind
from autotune.units import KIB, MIB

_NUM_THREADS = 2  # that compute products: the one that trains, and autograd's own, each with a handle


def workspaces(gpu: GpuKind, environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Bytes of each workspace, as `getChosenWorkspaceSize` in `aten/src/ATen/cuda/CublasHandlePool.cpp` chooses them.

    CUBLAS_WORKSPACE_CONFIG says it, as in `:4096:8`: eight buffers of 4096 KiB. Without it data centre GPUs since Hopper get 32 MiB.
    """
    said = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    size_bytes = 32 * MIB if gpu.capability[0] in (9, 10) else 8 * MIB + 128 * KIB
    if said:
        size_bytes = sum(int(kib) * int(number) for kib, number in said) * KIB
    return (size_bytes,) * _NUM_THREADS
