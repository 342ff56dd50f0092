"""A process that trains nothing runs out of memory before the host does."""

from __future__ import annotations

import torch

from autotune.devices import cpu
from tests.devices.processes import in_process


def test_an_allocation_of_more_than_is_free_fails_and_leaves_a_reserve() -> None:
    allowed_bytes, failed = in_process(_bounded)
    assert allowed_bytes > 0 and failed


def _bounded() -> tuple[int, bool]:
    allowed_bytes = cpu.bound_host_memory()
    try:
        torch.empty(allowed_bytes + cpu._RESERVE_BYTES, dtype=torch.uint8)
    except RuntimeError:
        return allowed_bytes, True
    return allowed_bytes, False
