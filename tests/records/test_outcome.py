"""Outcomes survive JSON, and a probe that was ended early leaves what it knew."""

import json
from dataclasses import replace

import pytest

from autotune.records.outcome import Bound, Kind, Outcome, Progress, calmer
from autotune.techniques import find_techniques
from tests.closed_form import measurement

techniques = find_techniques()


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


def measured(contention=0.0, *disturbances):
    found = measurement(techniques.complete({"batch_size": 1}), 1.0, 1)
    return Outcome(kind=Kind.OK, measurement=replace(found, contention=contention, disturbances=disturbances))


def test_of_two_runs_the_one_with_fewer_disturbances_counts_then_the_less_contended():
    hot, quiet = measured(0.0, "clock throttled: temperature (driver)"), measured(0.05)
    assert calmer(hot, quiet) is quiet
    busy, busier = measured(0.3, "others held the processor"), measured(0.6, "others held the processor")
    assert calmer(busier, busy) is busy
    assert calmer(busy, busier) is busy


def test_a_run_whose_memory_others_held_gives_way_to_the_next_and_takes_no_measurement_away():
    crowded = Outcome(kind=Kind.OOM, crowded=True)
    assert calmer(crowded, measured()).ok
    assert calmer(measured(0.5, "others"), crowded).ok
    assert Outcome.from_dict(crowded.to_dict()).crowded


def test_the_wait_at_the_start_of_a_pass_is_time_for_data_in_each_of_its_samples():
    config = techniques.complete({"batch_size": 10})
    plain = replace(measurement(config, 100.0, 1), phases_s={"data": 0.01, "forward": 0.03})
    found = plain.with_start_wait(1.0, 200, within=True)  # 5 ms for each sample, which take 10 ms
    assert found.samples_per_s == pytest.approx(1 / 0.015)
    assert found.step_s == pytest.approx(10 * 0.015)
    assert found.phases_s == pytest.approx({"data": 0.06, "forward": 0.03})
    assert found.block_samples_per_s == plain.block_samples_per_s
    assert plain.with_start_wait(0.0, 200, within=True) is plain


def test_a_wait_that_the_blocks_know_of_changes_no_speed():
    plain = replace(measurement(techniques.complete({"batch_size": 10}), 100.0, 1), phases_s={"data": 0.01})
    found = plain.with_start_wait(1.0, 200, within=False)
    assert (found.samples_per_s, found.start_wait_s) == (100.0, 1.0)
    assert found.phases_s == pytest.approx({"data": 0.06})
