"""The default sampler: the cost model, and tests of single techniques wherever it would have to take something on trust.

Techniques may need or hinder each other, so what won at another batch size is also tried at the best config's own.
"""

from __future__ import annotations

from autotune.proposers.base import FirstOf, Proposer
from autotune.proposers.cost_model import CLEARLY, CostModel
from autotune.proposers.one_at_a_time import TakeApart, TryAlone, UndoChanges
from autotune.proposers.taught import OnOwnJudgement, StartWhereOthersEnded
from autotune.records.config import BATCH_KEYS, BATCH_SIZE, Config
from autotune.records.study import Proposal
from autotune.study.history import History
from autotune.techniques import Techniques


class CarryOver:
    """Takes a combination that won at another batch size, and has a choice that the best lacks, to the best's batch size."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model

    def propose(self, history: History) -> Proposal | None:
        """The first of them that was not tried and is likely to fit; None when there is none."""
        if history.best is None:
            return None
        best, admissible = history.best[0], history.admissible()
        for winner in _winners(history):
            if not _has_more(winner, best, history.space.techniques):
                continue
            config = history.space.complete({**winner.as_dict(), BATCH_SIZE: best.batch_size})
            if admissible(config) and self._cost_model.is_likely_to_fit(history, config):
                return Proposal(config=config, reason=f"it won at batch {winner.batch_size}")
        return None


def _winners(history: History) -> list[Config]:
    """At each batch size the config that is clearly better than all others that ran."""
    merits: dict[int, dict[Config, float]] = {}
    for config, outcome in history.evidence:
        if outcome.ok:
            merits.setdefault(config.batch_size, {})[config] = history.objective.merit(outcome)
    winners = []
    for at_size in merits.values():
        first, *others = sorted(at_size, key=lambda config: at_size[config], reverse=True)
        if others and at_size[first] > CLEARLY * at_size[others[0]]:
            winners.append(first)
    return winners


def _has_more(winner: Config, best: Config, techniques: Techniques) -> bool:
    """Whether the winner switches on a choice that the best lacks; taking one away is left to `UndoChanges`."""
    return any(
        name not in BATCH_KEYS and not techniques.is_off(name, choice)
        for name, choice in winner.differences(best).items()
    )


def _never_on_trust(cost_model: CostModel, seed: int) -> Proposer:
    undo = UndoChanges(cost_model.is_likely_to_fit)
    first = StartWhereOthersEnded(cost_model)
    own = FirstOf([TakeApart(cost_model), CarryOver(cost_model), cost_model, undo, TryAlone(cost_model)])
    return FirstOf([first, OnOwnJudgement(own, cost_model)])


SAMPLERS = {"cost-model": _never_on_trust}
