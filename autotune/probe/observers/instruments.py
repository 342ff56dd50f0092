"""What the device's instruments tell: power, temperature, utilization, load."""

from __future__ import annotations

from dataclasses import replace

from autotune.devices import Device
from autotune.probe.observers.base import Observer
from autotune.records.outcome import Measurement


class Instruments(Observer):
    """Reads them when all is measured, with the device still warm."""

    name = "instruments"

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """With `telemetry`."""
        return replace(measured, telemetry={**measured.telemetry, **device.telemetry().values})
