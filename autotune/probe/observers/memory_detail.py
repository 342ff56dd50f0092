"""What the peak consists of, and how often an allocation succeeded only at the second attempt, or failed unnoticed."""

from __future__ import annotations

from dataclasses import replace

from autotune.devices import Device
from autotune.probe.observers.base import Observer
from autotune.records.outcome import Measurement


class MemoryDetail(Observer):
    """Reads the device's own figures of memory."""

    name = "memory detail"

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """Fill in `memory`, `num_alloc_retries` and `num_ooms`."""
        detail = device.memory_detail()
        retries, ooms = (int(detail.get(name, 0)) for name in ("num_alloc_retries", "num_ooms"))
        return replace(measured, memory=detail, num_alloc_retries=retries, num_ooms=ooms)
