"""What clearly won at another batch size is tried at the best's."""

from __future__ import annotations

from pathlib import Path

from autotune.proposers.default import CarryOver
from tests.proposers.test_one_at_a_time import World, searched


def test_what_won_at_another_batch_size_is_tried_at_the_bests(tmp_path: Path) -> None:
    world = World(gains={("amp", "bf16"): 1.15, ("channels_last", True): 1.1}, together=0.5)
    search = searched(tmp_path, world, {"amp": "bf16"}, {"channels_last": True, "batch_size": 8}, most=3)
    carry_over = CarryOver(search.cost_model)
    proposal = carry_over.propose(search.history)
    assert proposal is not None
    assert (proposal.config["amp"], proposal.config["channels_last"], proposal.config.batch_size) == ("bf16", False, 8)
    search.probe(proposal)
    assert carry_over.propose(search.history) is None


def test_what_only_lacks_something_is_left_to_undoing_changes(tmp_path: Path) -> None:
    world = World(gains={("amp", "bf16"): 1.15, ("channels_last", True): 1.1})
    search = searched(tmp_path, world, {"amp": "bf16"}, {"amp": "bf16", "channels_last": True, "batch_size": 8}, most=3)
    assert CarryOver(search.cost_model).propose(search.history) is None
