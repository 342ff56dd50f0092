"""The answer so far, at any time of a search: the best config, and its chance to be better than the baseline."""

from __future__ import annotations

from autotune.proposers.cost_model import CostModel
from autotune.records.config import Config
from autotune.records.outcome import Outcome
from autotune.study.history import History
from autotune.tuning.playoff import PlayOff

EVEN = 0.5  # a chance below this is one to be worse

Best = tuple[Config, Outcome]


def answer_so_far(
    history: History, cost_model: CostModel, play_off: PlayOff | None
) -> tuple[Best | None, float | None]:
    """The best config with its outcome in the search, and the chance that it is better than the baseline.

    Once a round of the play-off has ended, the best is the play-off's leader, and its rounds tell the chance. Where they say that it is
    more likely the worse one, the best is the baseline, if that may be the answer. Before that each config has one process, and the
    best was chosen because it came out above all others. The chance is then that of the model fitted to all probes, which does not take
    such luck for speed, and believes nothing that other studies taught.

    Returns:
        No best where nothing is feasible; no chance where the best is the baseline, or the baseline does not run.
    """
    best, baseline, base_config = history.best, history.baseline, history.space.baseline
    base = play_off.baseline if play_off is not None else None
    if play_off is not None and base is not None and not base.failed and (compared := play_off.compared):
        evidence = play_off.evidence()
        leader = play_off.leader(evidence, compared)
        chance = 1 - evidence.difference(leader.config, base.config).chance_below(0.0)
        if chance < EVEN and play_off.baseline_may_win:
            return (base.config, history.known[base.config]), None
        return (leader.config, history.known[leader.config]), chance
    if best is None or baseline is None or best[0] == base_config or not baseline.ok:
        return best, None
    return best, cost_model.untaught.chance_to_be_better(history, best[0], base_config)
