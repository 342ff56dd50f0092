"""Which settings the environment gives torch's CUDA allocator."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.lazy import torch

OLDER, NEWER = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


def tells_settings() -> bool:
    """Whether this torch tells the allocator's settings, as it does from 2.10 on."""
    return hasattr(torch._C, "_accelerator_getAllocatorSettings")


def settings_in(environment: Mapping[str, str]) -> str:
    """What the allocator reads: the older variable where it is set, even if it is empty; else, from torch 2.10 on, the newer one."""
    names = (OLDER, NEWER) if tells_settings() else (OLDER,)
    return next((environment[name] for name in names if name in environment), "")
