"""What need not be probed, for what takes no more of the same ran out of memory."""

from __future__ import annotations

from autotune.predict.memory import PeakSource, expected_bytes
from autotune.records.config import Config


class MemoryWalls:
    """The configs that were too large.

    Args:
        peaks: traced peaks, or None where the model cannot be traced.
    """

    def __init__(self, peaks: PeakSource | None) -> None:
        self._peaks = peaks
        self._too_large: dict[Config, list[Config]] = {}  # by the config with batch size 1 in its place

    def add(self, config: Config) -> None:
        """`config` needs more memory than there is."""
        self._too_large.setdefault(_without_batch(config), []).append(config)

    def rule_out(self, config: Config) -> bool:
        """Whether `config` needs no less than one that was too large: a batch as large, with the same techniques.

        Small batches of many shapes may need more than larger ones.
        """
        smaller = [c for c in self._too_large.get(_without_batch(config), ()) if c.batch_size <= config.batch_size]
        return any(not self._needs_less(config, other) for other in smaller)

    def _needs_less(self, config: Config, other: Config) -> bool:
        if self._peaks is None:
            return False
        mine, others = self._peaks.peak(config), self._peaks.peak(other)
        return mine is not None and others is not None and expected_bytes(mine) < expected_bytes(others)


def _without_batch(config: Config) -> Config:
    return config.replace(batch_size=1, accumulation_steps=1)
