"""How much of the time others held the processors or the GPU."""

from __future__ import annotations

from dataclasses import replace

from autotune.devices import Device
from autotune.devices.linux import DISTURBED
from autotune.probe.observers.base import Observer
from autotune.records.outcome import Measurement


class Contention(Observer):
    """Reads the device's count of others' time; more than a tenth is a disturbance."""

    name = "contention"
    sees_others = True

    def __init__(self) -> None:
        self._share = 0.0

    def end(self, device: Device) -> None:
        """Read others' share of the timed interval."""
        self._share = device.contention()

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """Fill in `contention`, and a disturbance in words where it is one."""
        if measured.cut_short:
            return measured
        share = self._share
        said = (f"others held the processor for {share:.0%} of the time",) if share > DISTURBED else ()
        return replace(measured, contention=share, disturbances=(*measured.disturbances, *said))
