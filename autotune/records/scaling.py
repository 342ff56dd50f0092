"""What several numbers of devices train, side by side, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from autotune.records.config import Choice
from autotune.records.formats import Record
from autotune.records.price import Price
from autotune.records.result import Money, Result


@dataclass(frozen=True, kw_only=True)
class OnDevices(Record):
    """The answer for one number of devices.

    Attributes:
        num_processes: number of processes, one for each device, or all on the CPU.
        samples_per_s: throughput of all processes together; `samples_per_s_ci`: its 95 % interval.
        peak_bytes: peak of the process that needs the most.
        verdict: the comparison with what the user runs today on as many devices.
        joules_per_sample: energy of all devices together, with its 95 % interval; None where it is not known.
        price, money: as in the result; None where no price was given.
        efficiency: throughput per device, over that on the fewest devices; `efficiency_ci`: its 95 % interval.
    """

    num_processes: int
    config: dict[str, Choice]
    samples_per_s: float
    samples_per_s_ci: tuple[float, float]
    peak_bytes: int
    verdict: str
    study: str
    joules_per_sample: float | None = None
    joules_per_sample_ci: tuple[float, float] | None = None
    price: Price | None = None
    money: Money | None = None
    efficiency: float = 1.0
    efficiency_ci: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of(cls, result: Result) -> Self:
        """The answer of a search."""
        return cls(
            num_processes=result.subject.num_processes,
            config=result.config,
            samples_per_s=result.samples_per_s,
            samples_per_s_ci=result.samples_per_s_ci,
            peak_bytes=result.peak_bytes,
            verdict=result.verdict,
            study=result.study,
            joules_per_sample=result.energy.joules_per_sample,
            joules_per_sample_ci=result.energy.joules_per_sample_ci,
            price=result.goal.price,
            money=result.money,
        )

    def over(self, fewest: OnDevices) -> OnDevices:
        """The same with its efficiency. The logarithms count as independent: squares of their intervals' half-widths are added."""
        ideal = fewest.samples_per_s * self.num_processes / fewest.num_processes
        efficiency = self.samples_per_s / ideal
        width = math.hypot(self._log_half_width, fewest._log_half_width) if self is not fewest else 0.0
        interval = (efficiency * math.exp(-width), efficiency * math.exp(width))
        return replace(self, efficiency=efficiency, efficiency_ci=interval)

    @property
    def _log_half_width(self) -> float:
        low, high = self.samples_per_s_ci
        return math.log(high / low) / 2 if 0 < low <= high < math.inf else math.inf


@dataclass(frozen=True, kw_only=True)
class Scaling(Record):
    """The answers for several numbers of devices, the fewest first.

    Attributes:
        failed: number of devices -> why it has no answer.
    """

    rows: tuple[OnDevices, ...]
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Sequence[OnDevices], failed: Mapping[int, str] | None = None) -> Self:
        """The answers, each compared with the one for the fewest devices."""
        ordered = sorted(found, key=lambda one: one.num_processes)
        rows = tuple(one.over(ordered[0]) for one in ordered)
        return cls(rows=rows, failed={str(number): why for number, why in (failed or {}).items()})
