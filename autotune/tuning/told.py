"""What is told of the configs that played: each figure with its interval, by one estimate, and within what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.records.config import Config
from autotune.records.measured import NORMAL_95, Measured
from autotune.records.outcome import Outcome
from autotune.study.figures import ratio_interval, times_as_fast
from autotune.tuning.entrant import Entrant, Ratio, inverse, samples_per_joule, samples_per_s
from autotune.tuning.evidence import Evidence, within_measured


def tell_figures(
    everyone: Sequence[Entrant], base: Entrant | None, candidate: Entrant | None, speeds: Evidence, thrift: Evidence
) -> dict[Config, Measured]:
    """The figures of those who ran.

    Args:
        base: the baseline, as long as it runs through.
        candidate: whose gain over the baseline is told first.
        speeds, thrift: what the rounds say of samples per second, and of samples per joule.
    """
    ran = [entrant for entrant in everyone if any(outcome.ok for outcome in entrant.outcomes.values())]
    figures = {entrant.config: entrant.measured() for entrant in ran}
    by_probe = {entrant.config for entrant in ran if entrant.is_told_by_probe}
    for config, (speed, low, high) in _tell(samples_per_s, speeds, ran, base, candidate).items():
        own = times_as_fast(figures[config], speed / figures[config].samples_per_s)
        figures[config] = replace(own, samples_per_s_ci=(low, high), by_probe=config in by_probe)
    for config, found in _tell(samples_per_joule, thrift, ran, base, candidate).items():
        joules, low, high = inverse(found)
        figures[config] = replace(figures[config], joules_per_sample=joules, joules_per_sample_ci=(low, high))
    return figures


def _tell(
    figure: Callable[[Outcome], float | None],
    evidence: Evidence,
    ran: Sequence[Entrant],
    base: Entrant | None,
    candidate: Entrant | None,
) -> dict[Config, Ratio]:
    """A figure of those who know it, with its interval, by one estimate: the baseline's own times the gain that is told of each.

    Where the baseline does not know it, the entrant that played most takes its place. Each figure lies within what was measured of
    its config, see `within_measured`.
    """
    logs = {e.config: [math.log(value) for o in e.told_by() if (value := figure(o))] for e in ran if e.rounds(figure)}
    known = [entrant for entrant in ran if logs.get(entrant.config)]
    if not known:
        return {}
    most_played = max(known, key=lambda entrant: len(entrant.rounds(figure)))
    first = base if base is not None and logs.get(base.config) else most_played
    beside = [entrant for entrant in known if entrant is not first and entrant.rounds_with(figure, first)]
    beside.sort(key=lambda entrant: entrant is not candidate)
    gains = {entrant.config: evidence.difference(entrant.config, first.config) for entrant in beside}
    level, low, high = (math.log(edge) for edge in ratio_interval(logs[first.config]))
    below, above = (math.hypot(edge, NORMAL_95 * first.least_unrest()) for edge in (level - low, high - level))
    levels = within_measured(
        {entrant.config: (min(logs[entrant.config]), max(logs[entrant.config])) for entrant in known},
        first.config,
        level,
        {config: gain.mean for config, gain in gains.items()},
    )
    told = {}
    for config, log in levels.items():
        gain, least, most = (0.0, 0.0, 0.0)
        if config in gains:
            gain, least, most = (math.log(edge) for edge in gains[config].ratio())
        low, high = log - math.hypot(below, gain - least), log + math.hypot(above, most - gain)
        told[config] = math.exp(log), math.exp(low), math.exp(high)
    return told
