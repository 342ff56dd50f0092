"""Where jobs run, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.device import DeviceInfo
from autotune.records.formats import Record


@dataclass(frozen=True, kw_only=True)
class Slot(Record):
    """A place for one job at a time.

    Attributes:
        name: as its runner calls it, no two of its slots alike: `cpu`, `cuda:1`.
        device: that a job trains on there, as it is now.
    """

    name: str
    device: DeviceInfo
