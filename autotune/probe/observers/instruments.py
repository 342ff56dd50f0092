"""What the device's instruments tell: power, temperature, utilization, load."""

from __future__ import annotations

from dataclasses import replace

from autotune.devices import Device
from autotune.probe.observers.base import Observer
from autotune.records.outcome import Measurement


class Instruments(Observer):
    """Reads the instruments after the measurement, while the device is still warm."""

    name = "instruments"

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """Fill in `telemetry`."""
        return replace(measured, telemetry={**measured.telemetry, **device.telemetry().values})
