"""Configs that need not be probed, because the same techniques ran out of memory at a batch no larger."""

from __future__ import annotations

from autotune.records.config import Config


class MemoryWalls:
    """The smallest batch of each combination of techniques that was too large."""

    def __init__(self) -> None:
        self._too_large: dict[Config, int] = {}  # by the config with batch size 1 in its place

    def add(self, config: Config) -> None:
        """`config` needs more memory than there is."""
        key = _without_batch(config)
        self._too_large[key] = min(config.batch_size, self._too_large.get(key, config.batch_size))

    def rule_out(self, config: Config) -> bool:
        """Whether the same techniques failed at this batch size or a smaller one."""
        smallest = self._too_large.get(_without_batch(config))
        return smallest is not None and smallest <= config.batch_size


def _without_batch(config: Config) -> Config:
    return config.replace(batch_size=1, accumulation_steps=1)
