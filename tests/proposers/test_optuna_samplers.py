"""What Optuna's samplers are told."""

from __future__ import annotations

from pathlib import Path

from autotune.proposers.optuna_samplers import OptunaProposer
from autotune.tuning.explore import measure_baseline
from tests.closed_form import ClosedFormRunner, make_search


def test_a_trial_of_another_search_that_ended_after_later_ones_is_told_and_none_is_told_twice(tmp_path: Path) -> None:
    search = make_search(tmp_path, ClosedFormRunner(), num_trials=6)
    measure_baseline(search)
    proposer = OptunaProposer("random", seed=0)
    while (proposal := proposer.propose(search.history)) is not None and len(search.history.trials) < 6:
        search.probe(proposal)
    every = search.history.trials
    late = OptunaProposer("tpe", seed=0)
    for known in (every[::2], every, every):
        search.history.catch_up(known, frozenset())
        told = late._told(search.history).trials
        assert len(told) == len(known)
    assert {str(trial.params) for trial in told} == {str(search.history.space.params(one.config)) for one in every}
