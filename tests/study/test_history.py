"""What of a study's past stands, and what a resumed search tries again."""

from dataclasses import dataclass

import pytest

from autotune.records.config import Config
from autotune.records.outcome import Kind, Outcome
from autotune.study.history import feasible_each_time, what_stands

CONFIG = Config((("batch_size", 4), ("accumulation_steps", 1)))


@dataclass(frozen=True)
class Probe:
    stage: str
    number: int
    feasible: bool


def outcome(kind, wall_s=1.0):
    return Outcome(kind=kind, wall_s=wall_s)


def final(*kinds, baseline=False, wall_s=1.0):
    return what_stands([outcome(kind, wall_s) for kind in kinds], 20.0, baseline=baseline) is not None


@pytest.mark.parametrize("kind", [Kind.CRASHED, Kind.ERROR])
def test_a_crash_or_an_error_gets_a_second_try_and_no_third(kind):
    assert not final(kind)
    assert final(kind, kind)
    assert final(kind, Kind.OK)


@pytest.mark.parametrize("kind", [Kind.OK, Kind.OOM, Kind.NONFINITE, Kind.UNSUPPORTED])
def test_what_does_not_pass_by_itself_stands(kind):
    assert final(kind)


def test_a_failure_takes_nothing_from_what_was_measured():
    measured = outcome(Kind.OK, 2.0)
    assert what_stands([measured, outcome(Kind.CRASHED)], 20.0, baseline=False) == measured


def test_a_probe_that_was_killed_sooner_than_it_would_be_now_is_tried_again():
    assert not final(Kind.TIMEOUT, wall_s=10.0)
    assert final(Kind.TIMEOUT, wall_s=20.1)


@pytest.mark.parametrize("kind", [Kind.CRASHED, Kind.ERROR, Kind.NONFINITE, Kind.TIMEOUT])
def test_a_baseline_that_failed_is_always_tried_again_unless_for_memory(kind):
    assert not final(kind, kind, kind, baseline=True, wall_s=30.0)
    assert final(kind, Kind.OOM, baseline=True)
    assert final(kind, Kind.OK, baseline=True)


def test_what_came_before_the_last_probe_of_a_search_no_longer_counts():
    stages = ["search", "play-off", "search", "play-off", "play-off"]
    probes = [Probe(stage, number, number != 0) for number, stage in enumerate(stages)]
    counted = feasible_each_time((CONFIG, probe) for probe in probes)
    assert [probe.number for probe in counted[CONFIG]] == [2, 3, 4]
    assert feasible_each_time([(CONFIG, probes[1])]) == {CONFIG: [probes[1]]}


def test_a_config_that_failed_since_its_last_probe_of_a_search_is_not_feasible():
    assert feasible_each_time([(CONFIG, Probe("search", 0, True)), (CONFIG, Probe("play-off", 1, False))]) == {}
