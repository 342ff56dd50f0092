"""Where the time of a training step goes, and what the allocator really holds."""

from types import SimpleNamespace

import torch

from autotune.devices.cuda import CudaDevice
from autotune.probe.module_times import _allocations


def test_on_a_gpu_what_was_allocated_before_the_model_is_no_part_of_its_peak(monkeypatch):
    reset = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 64)  # cuBLAS's workspaces
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: reset.append(1))
    held: list[int] = []
    with _allocations(SimpleNamespace(capabilities=CudaDevice.capabilities, enter=lambda: None), held):
        assert reset
    assert held == [36]
