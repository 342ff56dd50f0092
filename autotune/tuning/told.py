"""The speeds that are told of those who played: what their processes measured, and what is known of one over another.

The play-off's estimate of a gain weighs everything that is known, so by itself it may be more than any process showed. What
is told is the nearest to it that processes did measure: each speed lies within those of its config, and a gain is the ratio
of two of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.records.config import Config

Range = tuple[float, float]  # least and most


def within_measured(
    measured: Mapping[Config, Range], base: Config, level: float, gains: Mapping[Config, float]
) -> dict[Config, float]:
    """The logarithm of the speed that is told of each config.

    Args:
        measured: the range of the logarithms that the processes of each config measured.
        base: the config that gains are over; `level` is the mean of its own logarithms.
        gains: the estimated gain of each config over it, in logarithms, the most important first: where not all of them can
            be told at once, as when a config ran only while the machine was fast, the first ones are.

    Returns:
        Levels whose differences to that of `base` are the gains, as far as the ranges allow.
    """
    least, most = measured[base]
    for config, gain in gains.items():
        edges = [edge - gain for edge in measured[config]]
        least, most = (_clip(edge, (least, most)) for edge in edges)  # the nearest, where no level suits both
    level = _clip(level, (least, most))
    return {base: level} | {config: _clip(level + gain, measured[config]) for config, gain in gains.items()}


def _clip(value: float, within: Range) -> float:
    return min(max(value, within[0]), within[1])
