"""What a script has set in torch for its whole process. A model file says it again wherever it is imported; of a task built in Python
it has to travel with the task.

How many threads torch has belongs to a machine, so it goes by the environment of the processes there (`runners/connection.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autotune.lazy import torch

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def read_settings() -> dict[str, Any]:
    """Each setting with its value in this process, ready for JSON.

    One is left out where torch refuses to tell it: after a backend's `fp32_precision` was set, the older getters raise RuntimeError.
    """
    found = dict[str, Any]()
    for name, (read, _) in _settings().items():
        try:
            found[name] = read()
        except RuntimeError:
            continue
    return found


def apply_settings(asked: Mapping[str, Any]) -> None:
    """Set in this process what differs from it."""
    here = read_settings()
    for name, (_, write) in _settings().items():
        if name in asked and here.get(name) != asked[name]:
            write(asked[name])


def _settings() -> dict[str, _Setting]:
    cudnn, attention = torch.backends.cudnn, torch.backends.cuda
    return {
        "default_dtype": (
            lambda: str(torch.get_default_dtype()).removeprefix("torch."),
            lambda name: torch.set_default_dtype(getattr(torch, name)),
        ),
        "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "cudnn.allow_tf32": (lambda: cudnn.allow_tf32, lambda value: setattr(cudnn, "allow_tf32", value)),
        "cudnn.benchmark": (lambda: cudnn.benchmark, lambda value: setattr(cudnn, "benchmark", value)),
        "cudnn.deterministic": (lambda: cudnn.deterministic, lambda value: setattr(cudnn, "deterministic", value)),
        "flash_attention": (attention.flash_sdp_enabled, attention.enable_flash_sdp),
        "memory_efficient_attention": (attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp),
        "plain_attention": (attention.math_sdp_enabled, attention.enable_math_sdp),
        "cudnn_attention": (attention.cudnn_sdp_enabled, attention.enable_cudnn_sdp),
    }
