"""What comes of a job whose ranks several machines run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.records.config import Config
from autotune.records.energy import Counted
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import NotCompared
from autotune.runners.spread import put_together
from tests.closed_form import measurement

SMALL, LARGE = (
    Outcome(
        kind=Kind.OK, measurement=measurement(Config({"batch_size": 4, "accumulation_steps": 1}), 100.0, peak_bytes)
    )
    for peak_bytes in (1, 2)
)
BROKEN = Outcome(kind=Kind.ERROR, cause="rank 1: ValueError: the data is broken")
LOST = Outcome(kind=Kind.ERROR, cause="rank 0: RuntimeError: Connection closed by peer [127.0.0.1]:4242")


def test_what_all_measured_has_the_highest_peak_whoever_ended_first() -> None:
    assert put_together({1: LARGE, 0: SMALL}) == replace(SMALL, measurement=LARGE.measurement)


def test_the_energy_of_all_machines_adds_up_although_their_counters_have_the_same_names() -> None:
    """Two processes share the counter on each machine."""
    assert SMALL.measurement is not None
    on_each = [Counted(counter="intel-rapl:0", power_w=90.0, own_work=0.5)] * 2
    part = replace(SMALL, measurement=SMALL.measurement.with_energy(on_each))
    together = put_together({0: part, 1: part}).measurement
    assert together.joules_per_sample == pytest.approx(2 * 90.0 / 100.0)


def test_a_failure_counts_before_those_that_lost_a_peer_by_it() -> None:
    assert put_together({0: LOST, 1: BROKEN}) == BROKEN
    assert put_together({0: SMALL, 1: BROKEN}) == BROKEN
    assert put_together({0: LOST}) == LOST


def test_of_what_is_no_outcome_rank_0_tells() -> None:
    first, second = NotCompared(reason="of rank 0"), NotCompared(reason="of rank 1")
    assert put_together({1: second, 0: first}) is first
    assert put_together({0: first, 1: BROKEN}) == BROKEN
