"""What each change of an answer did by itself, as far as pairs of configs that differ in it alone tell."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean

from autotune.records.config import ACCUMULATION, Config
from autotune.records.result import Effect
from autotune.records.study import Trial
from autotune.study.figures import unrest
from autotune.study.history import feasible_each_time
from autotune.tuning.evidence import SEARCH, Evidence

TAIL = 0.025  # on either side of an interval

Pair = tuple[Config, Config]  # with a change and without it


def effects(answer: Config, baseline: Config, probed: Sequence[Trial]) -> tuple[Effect, ...]:
    """The effect of each choice that differs from the baseline's. Pairs that nothing disturbed are used where there are any.

    Args:
        probed: every probe of the study, play-offs included.
    """
    known = feasible_each_time(probed)
    calm = {config for config, trials in known.items() if not all(trial.outcome.disturbances for trial in trials)}
    disturbances: dict[Hashable, dict[int, float]] = {
        config: {_round(t): unrest(t.outcome) for t in trials} for config, trials in known.items()
    }
    evidence = Evidence({config: _logs(trials) for config, trials in known.items()}, {}, disturbances)
    found = []
    for name, choice in answer.differences(baseline).items():
        if name == ACCUMULATION:
            continue
        pairs = [
            (config, other)
            for config in known
            for other in known
            if config[name] == choice and other[name] == baseline[name] and differ(config, other) == [name]
        ]
        undisturbed = [(config, other) for config, other in pairs if config in calm and other in calm]
        used = undisturbed or pairs
        ratio, interval = _speed(evidence, used)
        peaks = [_log_peak(known[config]) - _log_peak(known[other]) for config, other in used]
        found.append(
            Effect(
                technique=name,
                choice=choice,
                baseline_choice=baseline[name],
                speed_ratio=ratio,
                speed_ratio_ci=interval,
                memory_ratio=math.exp(fmean(peaks)) if peaks else None,
                num_pairs=len(used),
                disturbed=bool(pairs) and not undisturbed,
            )
        )
    return tuple(found)


def differ(config: Config, other: Config) -> list[str]:
    """What two configs differ in, but for the accumulation that follows from the batch."""
    return [name for name in config.differences(other) if name != ACCUMULATION]


def _logs(trials: Sequence[Trial]) -> Mapping[int, float]:
    """A config's throughput by round, in logarithms. That of the search stays: it ties configs that did not play to the others."""
    calm = any(trial.in_play_off and not trial.outcome.disturbances for trial in trials)
    used = [trial for trial in trials if not (calm and trial.in_play_off and trial.outcome.disturbances)]
    found = [(_round(trial), trial.outcome.measurement) for trial in used]
    return {number: math.log(measured.samples_per_s) for number, measured in found if measured is not None}


def _round(trial: Trial) -> int:
    """The round of the play-off that a trial belongs to; the search counts as one."""
    return SEARCH if trial.round is None else trial.round


def _speed(evidence: Evidence, pairs: Sequence[Pair]) -> tuple[float, tuple[float, float]] | tuple[None, None]:
    """The ratio of throughputs, with its 95 % interval by the noise between equal processes: as if pairs shared no config."""
    if not pairs:
        return None, None
    found = [evidence.difference(config, other) for config, other in pairs]
    mean = fmean(one.mean for one in found)
    half = math.hypot(*((one.quantile(1 - TAIL) - one.quantile(TAIL)) / 2 for one in found)) / len(found)
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def _log_peak(trials: Sequence[Trial]) -> float:
    return math.log(max(trial.outcome.measurement.peak_bytes for trial in trials if trial.outcome.measurement))
