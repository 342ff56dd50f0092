"""A pass that is tried while a session is prepared leaves the model as it was. What it changes: `test_compile.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.techniques.build import _unchanged


class Devices(TorchDispatchMode):
    """Notes on which devices tensors are made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.found.add(out.device.type)
        return out


def test_what_is_noted_of_a_model_lies_on_the_host_and_not_on_its_device() -> None:
    device = "meta"  # without values it stands for any but the host
    with FakeTensorMode():
        layers = [nn.Linear(4, 4, device=device) for _ in range(2)]
        layers[0].requires_grad_(False)
        layers[1].register_buffer("queue", torch.empty(4, device=device))
        noted = _unchanged(nn.Sequential(*layers))
        with Devices() as devices:
            noted.__enter__()
        noted.__exit__(None, None, None)
    assert devices.found == {"cpu"}
