"""What was predicted of a probe before it ran, as plain data: kept with the probe, and shown beside what it found."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.formats import Record
from autotune.records.world import ALONE, World


@dataclass(frozen=True, kw_only=True)
class Prediction(Record):
    """A prediction for one config. Intervals are 95 %.

    Attributes:
        samples_per_s: None before any probe has run, with its interval.
        peak_bytes: comparable with the memory limit; None where nothing is known of it, with its interval.
        chance_to_win: that the config is at least 1 % better than the best known one; None without one.
        chance_to_fit: that its peak is within the limit less headroom.
        reason: why it is probed, in a few words.
        world: the processes that are to train the config together.
    """

    samples_per_s: float | None
    samples_per_s_low: float | None
    samples_per_s_high: float | None
    peak_bytes: int | None
    peak_low_bytes: int | None
    peak_high_bytes: int | None
    chance_to_win: float | None
    chance_to_fit: float
    reason: str
    world: World = ALONE
