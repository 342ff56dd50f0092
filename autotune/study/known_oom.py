"""Known OOM: configs that need no probe, because the same config with a smaller batch was too large."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.records.config import Config


class KnownOom:
    """Configs that need more memory than there is. A larger micro batch with the same techniques needs at least as much.

    Args:
        too_large: configs that ran out of memory, or needed more than the limit less headroom.
    """

    def __init__(self, too_large: Iterable[Config]) -> None:
        self._smallest: dict[
            Config, int
        ] = {}  # batch size that is too large, by the config with batch size 1 in its place
        for config in too_large:
            key = _without_batch(config)
            self._smallest[key] = min(config.batch_size, self._smallest.get(key, config.batch_size))

    def rules_out(self, config: Config) -> bool:
        """Whether `config`, or the same config with a smaller batch, was too large."""
        if not self._smallest:
            return False
        smallest = self._smallest.get(_without_batch(config))
        return smallest is not None and config.batch_size >= smallest


def _without_batch(config: Config) -> Config:
    return config.replace(batch_size=1, accumulation_steps=1)
