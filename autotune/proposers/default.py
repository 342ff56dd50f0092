"""The default sampler: the cost model, and tests of single techniques wherever it would have to take something on trust."""

from __future__ import annotations

from autotune.proposers.base import FirstOf, Proposer
from autotune.proposers.carry_over import CarryOver
from autotune.proposers.cost_model import CostModel
from autotune.proposers.one_at_a_time import TakeApart, TryAlone, UndoChanges


def _never_on_trust(cost_model: CostModel, seed: int) -> Proposer:
    undo = UndoChanges(cost_model.is_likely_to_fit)
    return FirstOf([TakeApart(cost_model), CarryOver(cost_model), cost_model, undo, TryAlone(cost_model)])


SAMPLERS = {"cost-model": _never_on_trust}
