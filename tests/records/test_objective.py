"""What makes one outcome better than another, and what may be recommended."""

from dataclasses import replace

import pytest

from autotune.records.objective import OBJECTIVES
from autotune.records.outcome import Kind, Outcome
from autotune.techniques import find_techniques
from tests.closed_form import measurement

techniques = find_techniques()

MIB = 2**20
CONFIG = techniques.complete({"batch_size": 8})


def ok(samples_per_s=100.0, peak_mib=500, **changes):
    return Outcome(kind=Kind.OK, measurement=replace(measurement(CONFIG, samples_per_s, peak_mib * MIB), **changes))


def objective(name="throughput"):
    return OBJECTIVES[name](memory_limit_bytes=1000 * MIB, headroom=0.05)


def test_throughput_prefers_the_faster():
    assert objective().score(ok(120)) > objective().score(ok(100))


def test_memory_prefers_the_smaller():
    assert objective("memory").score(ok(peak_mib=300)) > objective("memory").score(ok(peak_mib=500))


def test_balanced_takes_half_the_memory_for_less_than_a_1_4_times_slower_run():
    assert objective("balanced").score(ok(80, 250)) > objective("balanced").score(ok(100, 500))
    assert objective("balanced").score(ok(60, 250)) < objective("balanced").score(ok(100, 500))


@pytest.mark.parametrize("name", ["throughput", "memory", "balanced", "energy"])
def test_merit_is_positive_and_orders_as_the_score_does(name):
    one, other = ok(100, 400, joules_per_sample=3.0), ok(130, 600, joules_per_sample=4.0)
    chosen = objective(name)
    assert chosen.merit(one) > 0
    assert (chosen.merit(one) > chosen.merit(other)) == (chosen.score(one) > chosen.score(other))


def test_energy_prefers_fewer_joules_however_slow() -> None:
    assert objective("energy").score(ok(50, joules_per_sample=2.0)) > objective("energy").score(
        ok(100, joules_per_sample=3.0)
    )


def test_what_was_not_observed_is_not_recommended_and_says_nothing_in_the_play_off() -> None:
    chosen = objective("energy")
    assert not chosen.is_known(ok()) and not chosen.feasible(ok())
    assert chosen.score(ok()) == chosen.worst()
    assert chosen.in_play_off().feasible(ok())
    assert chosen.feasible(ok(joules_per_sample=2.0)) and objective().feasible(ok())


def test_what_uses_the_headroom_is_not_feasible():
    assert objective().feasible(ok(peak_mib=949))
    assert not objective().feasible(ok(peak_mib=951))
    assert objective().feasible(ok(peak_mib=500, long_run_growth_bytes=449 * MIB))
    assert not objective().feasible(ok(peak_mib=500, long_run_growth_bytes=451 * MIB))


def test_what_made_the_allocator_flush_its_cache_is_not_feasible():
    assert not objective().feasible(ok(num_alloc_retries=1))
    assert not objective().feasible(ok(num_ooms=1))


def test_with_the_objective_memory_what_is_slower_than_the_baseline_is_not_feasible():
    chosen = objective("memory").with_baseline(ok(100))
    assert chosen.feasible(ok(98))
    assert not chosen.feasible(ok(90))


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.OK])
def test_what_did_not_run_is_not_feasible(kind):
    assert objective().infeasibility(Outcome(kind=kind)) > 0
