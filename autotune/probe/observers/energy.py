"""The energy of a sample, by the counters of the device that trains."""

from __future__ import annotations

import time

from autotune.devices import Device
from autotune.probe.observers.base import Observer
from autotune.records.energy import Counted
from autotune.records.outcome import Measurement
from autotune.units import format_seconds


class Energy(Observer):
    """Reads the counters before the first timed block, after each, and after the last."""

    name = "energy"

    def __init__(self) -> None:
        self._began_s = self._window_s = 0.0
        self._joules: dict[str, float] = {}
        self._own_work = 1.0

    def start(self, device: Device) -> None:
        """Note when counting began."""
        self._began_s = time.monotonic()

    def sample(self, device: Device, num_steps: float) -> None:
        """Read the counters, before one goes round twice."""
        device.energy_j()

    def end(self, device: Device) -> None:
        """Read the counters for the last time."""
        self._joules, self._own_work = device.energy_j(), device.own_work()
        self._window_s = time.monotonic() - self._began_s

    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """Fill in `counted`, and the energy of a sample, or why that is not known."""
        if measured.cut_short:
            return measured
        if not self._joules:
            return measured.with_energy((), device.why_no_energy() or f"the counter of {device.name} could not be read")
        if self._window_s < (least_s := device.capabilities.energy_window_s):
            timed, least = format_seconds(self._window_s), format_seconds(least_s)
            return measured.with_energy((), f"the counter of energy needs {least} of timing, and there were {timed}")
        return measured.with_energy(
            Counted(counter=name, power_w=joules / self._window_s, own_work=self._own_work)
            for name, joules in self._joules.items()
        )
