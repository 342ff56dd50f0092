"""What need not be probed, for less of the same ran out of memory."""

from __future__ import annotations

from autotune.config import Config
from autotune.predict.memory import PeakSource


class MemoryWalls:
    """Per combination of techniques the smallest micro batch that was too large.

    Args:
        peaks: traced peaks, or None where the model cannot be traced.
    """

    def __init__(self, peaks: PeakSource | None) -> None:
        self._peaks = peaks
        self._smallest: dict[Config, int] = {}  # config with batch size 1 in its place -> batch size

    def add(self, config: Config) -> None:
        """`config` needs more memory than there is."""
        key = _without_batch(config)
        self._smallest[key] = min(config.batch_size, self._smallest.get(key, config.batch_size))

    def rule_out(self, config: Config) -> bool:
        """Whether `config` needs no less than one that was too large."""
        too_large = self._smallest.get(_without_batch(config))
        if too_large is None or config.batch_size < too_large:
            return False
        return not self._has_fewer_kernels(config, config.replace(batch_size=too_large))

    def _has_fewer_kernels(self, large: Config, small: Config) -> bool:
        """Whether the small batch may have failed by what the kernels of its many shapes hold, which a large one need not."""
        if self._peaks is None:
            return False
        of_large, of_small = self._peaks.peak(large), self._peaks.peak(small)
        return of_large is not None and of_small is not None and of_large.num_kernels < of_small.num_kernels


def _without_batch(config: Config) -> Config:
    return config.replace(batch_size=1, accumulation_steps=1)
