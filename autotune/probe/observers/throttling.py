"""What slows the device's clock down: heat, a weak power supply."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autotune.devices import Device
from autotune.devices.linux import DISTURBED
from autotune.probe.observers.base import Observer
from autotune.records.outcome import THROTTLED, Measurement


class Throttling(Observer):
    """Reads the reasons for a lower clock after each block; one seen after more than a tenth of the blocks is a disturbance."""

    name = "throttling"

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def sample(self, device: Device, num_steps: float) -> None:
        """Count the reasons that hold now."""
        self._seen.update(device.slowdowns())

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """Add the reasons that disturb, in words."""
        least = DISTURBED * len(measured.block_samples_per_s)
        said = tuple(f"{THROTTLED}{reason}" for reason, number in self._seen.items() if number > least)
        return replace(measured, disturbances=(*measured.disturbances, *said))
