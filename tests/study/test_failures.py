"""What a failure says: which are tried again when a search is resumed, and what a time-out says of other configs."""

from dataclasses import replace

import pytest

from autotune.records.config import Config
from autotune.records.objective import Throughput
from autotune.records.outcome import Bound, Kind, Outcome
from autotune.records.study import Trial
from autotune.study.failures import KnownHangs, retryable, what_stands
from autotune.techniques import find_techniques
from tests.closed_form import measurement

techniques = find_techniques()
OBJECTIVE = Throughput(memory_limit_bytes=2**30, headroom=0.05)
CONFIG = Config((("batch_size", 4), ("accumulation_steps", 1)))
OTHER = Config((("batch_size", 8), ("accumulation_steps", 1)))
TIMEOUT_S = 20.0


def trials(*kinds, stage="search", wall_s=1.0, config=CONFIG):
    return [
        Trial(
            number=number,
            stage=stage,
            config=config,
            reason="",
            prediction=None,
            round=None,
            outcome=Outcome(kind=kind, wall_s=wall_s),
            feasible=False,
            score=0.0,
        )
        for number, kind in enumerate(kinds)
    ]


def is_tried_again(*kinds, baseline=False, **changes):
    baselines = {CONFIG} if baseline else {OTHER}
    found = retryable(trials(*kinds, **changes), baselines, lambda measured: TIMEOUT_S, OBJECTIVE)
    assert found in (frozenset(), frozenset(range(len(kinds))))
    return bool(found)


@pytest.mark.parametrize("kind", [Kind.CRASHED, Kind.ERROR])
def test_a_crash_or_an_error_gets_a_second_try_and_no_third(kind):
    assert is_tried_again(kind)
    assert not is_tried_again(kind, kind)
    assert not is_tried_again(kind, Kind.OK)


@pytest.mark.parametrize("kind", [Kind.OK, Kind.OOM, Kind.NONFINITE, Kind.UNSUPPORTED])
def test_what_does_not_pass_by_itself_stands(kind):
    assert not is_tried_again(kind)


def test_what_lacked_memory_that_others_held_is_tried_again():
    def alone(outcome):
        trial = trials(Kind.OOM)[0]
        return retryable([replace(trial, outcome=outcome)], {OTHER}, lambda measured: TIMEOUT_S, OBJECTIVE)

    assert not alone(Outcome(kind=Kind.OOM))
    assert alone(Outcome(kind=Kind.OOM, crowded=True))


def test_a_failure_takes_nothing_from_what_was_measured():
    measured = Outcome(kind=Kind.OK, wall_s=2.0)
    assert what_stands([measured, Outcome(kind=Kind.CRASHED)]) == measured


def test_a_probe_that_was_killed_sooner_than_it_would_be_now_is_tried_again():
    assert is_tried_again(Kind.TIMEOUT, wall_s=10.0)
    assert not is_tried_again(Kind.TIMEOUT, wall_s=20.1)


@pytest.mark.parametrize("kind", [Kind.CRASHED, Kind.ERROR, Kind.NONFINITE, Kind.TIMEOUT])
def test_a_baseline_that_failed_is_always_tried_again_unless_for_memory(kind):
    assert is_tried_again(kind, kind, kind, baseline=True, wall_s=30.0)
    assert not is_tried_again(kind, Kind.OOM, baseline=True)
    assert not is_tried_again(kind, Kind.OK, baseline=True)


def test_the_baselines_time_says_how_long_a_probe_would_be_given_now():
    slow = Outcome(kind=Kind.OK, wall_s=7.0)
    given = []

    def timeout_s(measured):
        given.append(measured)
        return TIMEOUT_S

    baseline = trials(Kind.OK, wall_s=7.0, config=OTHER)
    retryable([*baseline, *trials(Kind.TIMEOUT)], {OTHER}, timeout_s, OBJECTIVE)
    assert given == [slow]


@pytest.mark.parametrize(("kind", "again"), [(Kind.OOM, False), (Kind.CRASHED, True), (Kind.TIMEOUT, True)])
def test_in_the_play_off_only_what_did_not_fit_stands(kind, again):
    assert is_tried_again(kind, stage="play-off") is again


def test_what_was_ended_stays_so_where_it_was_shown_to_be_slower_than_the_fastest():
    ran = Outcome(kind=Kind.OK, measurement=measurement(OTHER, 3.0, 0))
    (fastest,) = [replace(trial, number=7, outcome=ran, feasible=True) for trial in trials(Kind.OK, config=OTHER)]
    (ended,) = trials(Kind.TIMEOUT)

    def retried(samples_per_s_high, *others):
        bound = Bound(samples_per_s_high=samples_per_s_high, peak_bytes_low=0)
        slow = replace(ended, outcome=replace(ended.outcome, bound=bound))
        return retryable([*others, slow], {OTHER}, lambda measured: TIMEOUT_S, OBJECTIVE)

    assert retried(1.0, fastest) == frozenset()
    assert retried(4.0, fastest) == retried(1.0) == {ended.number}


RAN, HUNG = Outcome(kind=Kind.OK), Outcome(kind=Kind.TIMEOUT)


def complete(**choices):
    return techniques.complete({"batch_size": 4, **choices})


ALL = complete(amp="bf16", channels_last=True, optimizer_impl="fused")


def test_after_a_probe_of_several_new_things_hung_they_are_taken_apart():
    hangs = KnownHangs({complete(): RAN, ALL: HUNG})
    assert hangs.rules_out(ALL.replace(batch_size=8))
    assert hangs.rules_out(complete(amp="bf16", channels_last=True))
    assert not hangs.rules_out(complete(channels_last=True))
    assert not hangs.rules_out(complete(amp="fp16"))


def test_what_ran_in_another_config_is_not_blamed():
    known = {complete(): RAN, ALL: HUNG, complete(channels_last=True, optimizer_impl="fused"): RAN}
    hangs = KnownHangs(known)
    assert hangs.rules_out(complete(amp="bf16")) and hangs.rules_out(complete(amp="bf16", batch_size=2))
    assert not hangs.rules_out(complete(amp="fp16", channels_last=True))


def test_a_time_out_of_what_has_run_otherwise_rules_nothing_out():
    assert not KnownHangs({complete(): RAN, complete(batch_size=64): HUNG}).rules_out(complete(batch_size=32))


def test_nothing_is_ruled_out_before_anything_runs():
    assert not KnownHangs({complete(): HUNG}).rules_out(ALL)


def test_what_was_ended_before_it_was_shown_to_be_slow_is_not_blamed():
    ran = Outcome(kind=Kind.OK, measurement=measurement(complete(), 3.0, 0))

    def rules_out_bf16(samples_per_s_high):
        ended = Outcome(kind=Kind.TIMEOUT, bound=Bound(samples_per_s_high=samples_per_s_high, peak_bytes_low=0))
        return KnownHangs({complete(): ran, complete(amp="bf16"): ended}).rules_out(complete(amp="bf16", batch_size=2))

    assert not rules_out_bf16(4.0)
    assert rules_out_bf16(1.0) and rules_out_bf16(None)
