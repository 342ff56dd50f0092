"""The answer so far, at any time of a search: the best config, and its chance to be better than the baseline."""

from __future__ import annotations

import math

from autotune.records.config import Config
from autotune.records.outcome import Outcome
from autotune.study.figures import unrest
from autotune.study.history import History
from autotune.tuning.evidence import Evidence, Key, Searched
from autotune.tuning.playoff import PlayOff

Best = tuple[Config, Outcome]


def answer_so_far(history: History, play_off: PlayOff | None) -> tuple[Best | None, float | None]:
    """The best config with its outcome in the search, and the chance that it is better than the baseline.

    Once a round of the play-off has ended, the best is the play-off's leader. Before that each config has one process, and the best
    was chosen because it came out above all others: that is not taken for speed (`Evidence`).

    Returns:
        No best where nothing is feasible; no chance where the best is the baseline, or the baseline does not run.
    """
    best, baseline, base_config = history.best, history.baseline, history.space.baseline
    base = play_off.baseline if play_off is not None else None
    if play_off is not None and base is not None and not base.failed and (compared := play_off.compared):
        evidence = play_off.evidence()
        leader = play_off.leader(evidence, compared)
        chance = 1 - evidence.difference(leader.config, base.config).chance_below(0.0)
        return (leader.config, history.known[leader.config]), chance
    if best is None or baseline is None or best[0] == base_config or not history.objective.feasible(baseline):
        return best, None
    logs = {config: math.log(history.objective.merit(outcome)) for config, outcome in history.feasible.items()}
    bar = max((log for config, log in logs.items() if config != best[0]), default=None)
    base_log = math.log(history.objective.merit(baseline))
    searched: dict[Key, Searched] = {
        best[0]: Searched(logs[best[0]], bar, unrest(best[1])),
        base_config: Searched(base_log, None, unrest(baseline)),
    }
    return best, 1 - Evidence({}, searched).difference(best[0], base_config).chance_below(0.0)
