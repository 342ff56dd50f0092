"""Outcomes survive JSON, and a probe that was ended early leaves what it knew."""

import json

import pytest

from autotune.records.outcome import Bound, Kind, Outcome
from autotune.records.progress import Progress


@pytest.mark.parametrize("high", [None, 12.5])
def test_an_outcome_with_a_bound_comes_back_from_json(high):
    bound = Bound(samples_per_s_high=high, peak_bytes_low=2**30)
    outcome = Outcome(kind=Kind.TIMEOUT, cause="killed after 20 s", bound=bound)
    assert Outcome.from_dict(json.loads(json.dumps(outcome.to_dict()))) == outcome


def test_an_outcome_of_an_older_study_has_no_bound():
    data = Outcome(kind=Kind.OOM).to_dict()
    del data["bound"]
    assert Outcome.from_dict(data).bound is None


def test_a_probe_without_a_micro_step_bounds_nothing():
    assert Progress(stage="warmup", train_s=3.0).bound is None
    seen = Progress(stage="warmup", num_micro_steps=1, peak_bytes=7)
    assert seen.bound == Bound(samples_per_s_high=None, peak_bytes_low=7)
