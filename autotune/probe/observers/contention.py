"""How much of the time others held the processors or the GPU."""

from __future__ import annotations

from dataclasses import replace

from autotune.devices import Device
from autotune.devices.linux import DISTURBED
from autotune.probe.observers.base import Observer
from autotune.records.outcome import Measurement


class Contention(Observer):
    """Reads what the device counts; above a tenth of the time it disturbs."""

    name = "contention"
    sees_others = True

    def __init__(self) -> None:
        self._share = 0.0

    def end(self, device: Device) -> None:
        """Read the share of the time that was timed."""
        self._share = device.contention()

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """With `contention`, and in words where it disturbs."""
        if measured.cut_short:
            return measured
        share = self._share
        said = (f"others held the processor for {share:.0%} of the time",) if share > DISTURBED else ()
        return replace(measured, contention=share, disturbances=(*measured.disturbances, *said))
