"""`Observer`: one thing that is watched while a config is timed. All of a run's observers together are `Observers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar

from autotune import plugins
from autotune.devices import Device
from autotune.records.config import World
from autotune.records.outcome import Measurement

GROUP = "autotune.observers"


class Observer(ABC):
    """Watches one thing beside time, and writes what it saw into the measurement. Each run has an instance of its own.

    `sample_warmup` comes after each step of the warm-up, `start` once, when that is over; `sample` after each timed block, outside
    of what is timed; `end` once, after the last block, and `stop` once, when all is measured. Where a config is too slow to be timed,
    only `sample_warmup` and `stop` are called, the latter with a measurement that is `cut_short`. A whole observer, of how warm a GPU
    becomes while it trains:

        class Warming(Observer):
            name = "warming"

            def start(self, device: Device) -> None:
                self._first_c = self._most_c = device.telemetry().values.get("temperature_c", 0.0)

            def sample(self, device: Device, num_steps: float) -> None:
                self._most_c = max(self._most_c, device.telemetry().values.get("temperature_c", 0.0))

            def stop(self, device: Device, measured: Measurement) -> Measurement:
                if measured.cut_short:
                    return measured
                return replace(measured, telemetry={**measured.telemetry, "warmed_c": self._most_c - self._first_c})

    Its file is found because it is there. Another package offers one as an entry point in the group `autotune.observers`.

    Attributes:
        name: what it observes, in a word.
        sees_others: whether it sees other processes. Such an observer is left out where several train together: it would take
            them for strangers.
    """

    name: ClassVar[str]
    sees_others: ClassVar[bool] = False

    def sample_warmup(self, device: Device, num_steps: float) -> None:  # noqa: B027 (nothing, for most)
        """Look, after a step of the warm-up.

        Args:
            num_steps: as in `sample`.
        """

    def start(self, device: Device) -> None:  # noqa: B027
        """Begin to watch: the first block is about to be timed."""

    def sample(self, device: Device, num_steps: float) -> None:  # noqa: B027
        """Look, after a timed block.

        Args:
            num_steps: optimizer steps that were taken so far, warm-up included. A micro batch is a share of one: a probe of a config
                that accumulates takes shorter steps.
        """

    def end(self, device: Device) -> None:  # noqa: B027
        """Look for the last time: the last block was timed, and what follows is not."""

    @abstractmethod
    def stop(self, device: Device, measured: Measurement) -> Measurement:
        """The measurement, with what was seen."""


class Observers:
    """All observers of one run on a device, in the order of their files' names."""

    def __init__(self, device: Device, world: World) -> None:
        self._device = device
        self._all = [kind() for kind in kinds() if world.size == 1 or not kind.sees_others]

    def sample_warmup(self, num_steps: float) -> None:
        """A step of the warm-up was taken."""
        for observer in self._all:
            observer.sample_warmup(self._device, num_steps)

    def start(self) -> None:
        """Timing begins."""
        self._device.start_measuring()
        for observer in self._all:
            observer.start(self._device)

    def sample(self, num_steps: float) -> None:
        """A block was timed."""
        for observer in self._all:
            observer.sample(self._device, num_steps)

    def end(self) -> None:
        """Timing is over."""
        for observer in self._all:
            observer.end(self._device)

    def stop(self, measured: Measurement) -> Measurement:
        """The measurement, with what all of them have seen."""
        for observer in self._all:
            measured = observer.stop(self._device, measured)
        return measured


@cache
def kinds() -> tuple[type[Observer], ...]:
    """Every observer: the files of this package, and the entry points of others.

    Raises:
        ConfigError: an observer of another package cannot be used.
    """
    found = plugins.find_plugins(__name__.rpartition(".")[0], Observer, GROUP, ("name",))  # type: ignore[type-abstract]
    return tuple(map(type, found.values()))
