"""What torch says of its GPUs, asked in a process that ends at once: where NVML is missing, or numbers GPUs in another order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.lazy import torch

_PATIENCE_S = 60.0
_SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")  # NVIDIA's driver, WSL's, AMD's
_ORDER = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True, kw_only=True)
class AskedGpu:
    """A GPU as torch describes it; `uuid` without NVML's prefix, empty where the build does not tell."""

    name: str
    uuid: str
    capability: tuple[int, int]
    num_multiprocessors: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The GPUs in CUDA's order, and what torch said about it (why there is none, say)."""

    gpus: tuple[AskedGpu, ...] = ()
    why: str = ""


_answers: dict[tuple[str | None, ...], Answer] = {}


def ask_torch() -> Answer:
    """What torch sees in this environment. The first call takes as long as importing torch, and a context for a moment."""
    key = tuple(os.environ.get(name) for name in _ORDER)
    if key not in _answers:
        _answers[key] = _ask()
    return _answers[key]


def describe(torch: Any, index: int) -> AskedGpu:
    """A GPU as the torch of this process describes it, which gives it a context."""
    told, memory = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    uuid = str(getattr(told, "uuid", ""))  # not in every ROCm build
    return AskedGpu(
        name=told.name,
        uuid=uuid.removeprefix("GPU-").removeprefix("MIG-"),
        capability=(told.major, told.minor),
        num_multiprocessors=told.multi_processor_count,
        free_bytes=memory[0],
        total_bytes=memory[1],
    )


def is_there_a_sign_of_a_gpu() -> bool:
    """Whether a driver's device file says that a GPU may be there, whatever NVML knows of it, and none is hidden on purpose."""
    hidden = any(os.environ.get(name) == "" for name in _ORDER)
    return not hidden and any(Path(sign).exists() for sign in _SIGNS)


def _ask() -> Answer:
    environment = {name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    command = [sys.executable, "-c", "from autotune.devices import asked; asked.answer()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, env=environment)
        told = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        return Answer(why=f"asking torch failed: {error}"[:300])
    gpus = tuple(AskedGpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in told["gpus"])
    return Answer(gpus=gpus, why=told["why"])


def answer() -> None:
    """Print what torch sees; what runs in the other process."""
    gpus, why = [], ""
    with warnings.catch_warnings(record=True) as said:  # `is_available` tells by a warning why not
        warnings.simplefilter("always")
        try:
            number = torch.cuda.device_count() if torch.cuda.is_available() else 0
            gpus = [asdict(describe(torch, index)) for index in range(number)]
        except Exception as error:
            why = str(error)
    why = why or "; ".join(str(warning.message) for warning in said)
    sys.stdout.write(json.dumps({"gpus": gpus, "why": " ".join(why.split())[:300]}) + "\n")
