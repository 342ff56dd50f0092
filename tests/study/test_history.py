"""The views of a history: what is known, what is the best, what may be probed next; and what a failure says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autotune.records.config import Config, ShapeGrowth, World
from autotune.records.inspection import Support
from autotune.records.objective import Throughput
from autotune.records.outcome import Bound, Kind, Outcome
from autotune.records.study import Trial
from autotune.space import build_space
from autotune.study.history import History, KnownHangs, feasible_each_time, retryable, what_stands
from autotune.techniques import find_techniques
from tests.closed_form import LIMIT_BYTES, inspection, measurement

techniques = find_techniques()

SPACE = build_space(inspection(), find_techniques())[0]
OBJECTIVE = Throughput(memory_limit_bytes=LIMIT_BYTES, headroom=0.05)
OOM = Outcome(kind=Kind.OOM, wall_s=0.1)
CONFIG = Config((("batch_size", 4), ("accumulation_steps", 1)))
OTHER = Config((("batch_size", 8), ("accumulation_steps", 1)))
TIMEOUT_S = 20.0


def config(batch_size, **choices):
    return techniques.complete({"batch_size": batch_size, **choices}, global_batch=96)


def ran(of, samples_per_s, peak_bytes=2**20):
    return Outcome(kind=Kind.OK, measurement=measurement(of, samples_per_s, peak_bytes), wall_s=0.1)


def error(cause):
    return Outcome(kind=Kind.ERROR, cause=cause, wall_s=0.1)


def trial(of, outcome, stage="search", number=0):
    feasible = OBJECTIVE.feasible(outcome)
    return Trial(
        number=number,
        stage=stage,
        config=of,
        reason="",
        prediction=None,
        round=None,
        outcome=outcome,
        feasible=feasible,
        score=1.0,
    )


def history(*trials):
    made = History(SPACE, OBJECTIVE)
    for number, one in enumerate(trials):
        made.append(replace(one, number=number))
    return made


def test_the_baseline_may_be_probed_however_long_it_takes_to_set_up():
    """A search that did not measure it could not tell a gain."""
    slow = Support(choices=("off", "default"), setup_s=(("default", 140.0),))
    known = inspection()
    compiled = {**known.baseline, "compile": "default"}
    known = replace(known, baseline=compiled, support={**known.support, "compile": slow})
    space, _ = build_space(known, techniques)
    may_be_probed = History(space, OBJECTIVE, setup_left_s=lambda history: 45.0).admissible()
    assert may_be_probed(space.baseline) and not may_be_probed(space.complete({"batch_size": 8}))


def test_an_empty_history_knows_nothing():
    empty = history()
    assert empty.best is None and empty.baseline is None and not empty.known and not empty.evidence


def test_the_best_is_the_fastest_that_is_feasible():
    slow, fast, large = config(4), config(8), config(16)
    known = history(
        trial(slow, ran(slow, 10.0)), trial(fast, ran(fast, 20.0)), trial(large, ran(large, 30.0, LIMIT_BYTES))
    )
    assert known.best == (fast, ran(fast, 20.0)) and known.best_score == 20.0


def test_what_failed_in_the_play_off_is_no_longer_the_best():
    first, second = config(8), config(6)
    known = history(
        trial(first, ran(first, 20.0)), trial(second, ran(second, 10.0)), trial(first, OOM, stage="play-off")
    )
    assert known.best[0] == second and known.failed_again == {first: OOM}


def test_a_choice_that_left_the_space_takes_its_configs_out_of_the_best():
    quick, plain = config(8, amp="bf16"), config(8)
    known = history(trial(quick, ran(quick, 20.0)), trial(plain, ran(plain, 10.0)))
    known.space = SPACE.without("amp", {"bf16"})
    assert known.best[0] == plain


def test_the_objective_knows_the_baselines_speed_once_it_is_measured():
    assert history().objective.baseline_samples_per_s is None
    known = history(trial(SPACE.baseline, ran(SPACE.baseline, 10.0), stage="baseline"))
    assert known.objective.baseline_samples_per_s == 10.0 and known.baseline == ran(SPACE.baseline, 10.0)


def test_models_learn_from_the_search_and_from_failures_of_the_play_off():
    of = config(8)
    known = history(trial(of, ran(of, 20.0)), trial(of, ran(of, 19.0), stage="play-off"), trial(of, OOM, "play-off"))
    assert known.evidence == [(of, ran(of, 20.0)), (of, OOM)]


def test_what_was_measured_again_stands_where_it_was_first_seen():
    of, other = config(8), config(16)
    known = history(trial(of, ran(of, 20.0)), trial(other, ran(other, 9.0)), trial(of, ran(of, 12.0)))
    assert known.evidence == [(of, ran(of, 12.0)), (other, ran(other, 9.0))]


def test_what_is_known_running_too_large_or_outside_the_space_may_not_be_probed():
    known = history(trial(config(8), ran(config(8), 20.0)), trial(config(24), OOM))
    known.running.add(config(6))
    may_be_probed = known.admissible()
    assert not any(map(may_be_probed, (config(8), config(24), config(48), config(6))))
    assert may_be_probed(config(12)) and may_be_probed(config(48, amp="bf16"))
    outside = config(4, num_workers=2)
    assert not may_be_probed(outside)


def test_a_batch_that_the_training_set_cannot_make_is_not_tried_again_nor_a_larger_one():
    too_few = Outcome(kind=Kind.ERROR, cause="a pass gives no batch", too_few_samples=True)
    may_be_probed = history(trial(config(12, amp="bf16"), too_few)).admissible()
    assert not any(map(may_be_probed, (config(12), config(16), config(48, optimizer_impl="fused"))))
    assert may_be_probed(config(8, amp="bf16"))


@pytest.mark.parametrize(
    ("others", "is_left"),
    [
        ([], True),  # a full disk, say, raises once
        ([trial(config(32, amp="bf16"), error("for 32 samples, expected at most 12"))], False),
        ([trial(config(32, amp="bf16"), error("bf16 is not implemented"))], True),
        # it was not the batch
        (
            [
                trial(config(32, amp="bf16"), error("for 32 samples, expected at most 12")),
                trial(config(48), ran(config(48), 10.0)),
            ],
            True,
        ),
    ],
)
def test_what_raises_with_a_large_batch_is_not_tried_with_it_or_a_larger_one(others, is_left):
    raised = trial(config(16), error("for 16 samples, expected at most 12"))
    may_be_probed = history(trial(config(8), ran(config(8), 10.0)), raised, *others).admissible()
    assert may_be_probed(config(24, amp="bf16")) == may_be_probed(config(96)) == is_left
    assert may_be_probed(config(12)) and may_be_probed(config(12, amp="bf16"))


@pytest.mark.parametrize("how", [{"amp": "bf16"}, {"amp": "bf16", "optimizer_impl": "fused"}])
def test_what_only_raises_with_a_choice_and_a_large_batch_is_tried_without_the_choice(how):
    """A kernel with a bound of its own, say."""
    raised = [trial(config(size, **how), error(f"bf16 of {size} samples")) for size in (16, 24)]
    ran_before = [trial(of, ran(of, 10.0)) for of in (config(8, **how), config(16))]
    may_be_probed = history(*ran_before, *raised).admissible()
    assert not may_be_probed(config(32, amp="bf16", optimizer_impl="fused"))
    assert not may_be_probed(config(32, **how)) and may_be_probed(config(12, **how))
    assert all(map(may_be_probed, (config(24), config(96), config(32, amp="fp16"))))


def test_between_the_batch_that_ran_and_the_one_that_raised_the_middle_comes_next():
    """Else each smaller size would be tried in turn."""
    ran_apart = [
        trial(of, ran(of, 10.0)) for of in (config(8), config(8, amp="bf16"), config(8, optimizer_impl="fused"))
    ]
    both = {"amp": "bf16", "optimizer_impl": "fused"}
    raised = [trial(of, error("too many")) for of in (config(96, **both), config(48))]
    known = history(*ran_apart, *raised)
    assert [size for size in (12, 16, 24, 32) if known.admissible()(config(size, **both))] == [12, 16]
    known.append(replace(trial(config(16), ran(config(16), 20.0)), number=9))
    assert [size for size in (24, 32) if known.admissible()(config(size))] == [24]
    (found,) = known.raised_by_batch()
    assert (found.cause, found.size, found.largest, found.choices) == ("too many", 48, 16, frozenset())
    assert found.holds_for(config(96, amp="bf16")) and not found.holds_for(config(32))


def test_an_error_of_a_choice_rules_out_no_batch():
    """It was never seen to run, so the batch is not to blame."""
    raised = [trial(config(size, amp="bf16"), error("bf16 is not implemented")) for size in (16, 32)]
    may_be_probed = history(trial(config(8), ran(config(8), 10.0)), *raised).admissible()
    assert may_be_probed(config(48))


def test_a_batch_that_data_workers_cannot_make_may_be_made_without_them():
    too_few = Outcome(kind=Kind.ERROR, cause="a pass gives no batch", too_few_samples=True)
    may_be_probed = history(trial(config(12, num_workers=2), too_few)).admissible()
    assert may_be_probed(config(12)) and may_be_probed(config(16))


def test_what_cannot_be_applied_together_is_left_alone_with_any_batch_and_whatever_else():
    refused = trial(config(8, amp="bf16"), Outcome(kind=Kind.UNSUPPORTED, cause="not here"))
    may_be_probed = history(refused).admissible()
    assert not may_be_probed(config(6, amp="bf16"))
    assert not may_be_probed(config(6, amp="bf16", optimizer_impl="fused"))
    assert may_be_probed(config(6)) and may_be_probed(config(6, amp="fp16"))


def test_whether_shapes_recur_is_told_by_the_probe_that_has_seen_the_most():
    def seen(number, num_shapes, recur):
        outcome = ran(config(8), 20.0)
        measured = replace(outcome.measurement, num_shapes=num_shapes, shapes_recur=recur)
        return trial(config(8, num_workers=number), replace(outcome, measurement=measured), number=number)

    assert history(seen(0, 1, recur=False)).shapes_recur is None
    assert history(seen(0, 8, recur=True)).shapes_recur is True
    assert history(seen(0, 8, recur=True), seen(1, 30, recur=False), seen(2, 1, recur=False)).shapes_recur is False


def test_how_many_shapes_come_and_what_they_take_is_told_by_probes_with_as_large_a_micro_batch():
    def told(number, batch_size, num_shapes, num_bytes, **choices):
        outcome = ran(config(batch_size), 20.0)
        growth = None if num_bytes is None else ShapeGrowth(bytes_per_shape=num_bytes)
        measured = replace(outcome.measurement, num_shapes_expected=num_shapes, shape_growth=growth)
        made = config(batch_size, num_workers=number, **choices)
        return trial(made, replace(outcome, measurement=measured), number=number)

    made = history(
        told(0, 8, 12.0, 5.0),
        told(1, 8, 15.5, 9.0, amp="bf16"),
        told(2, 6, 20.0, 3.0),
        told(3, 6, 60.0, 0.0),  # without growth no further batches were looked at
        told(4, 12, 8.0, None),
    )
    assert [made.num_shapes(config(size)) for size in (8, 6, 12)] == [15.5, 20.0, 0.0]
    assert made.shape_growth(config(8, optimizer_impl="fused")) == ShapeGrowth(bytes_per_shape=5.0)
    assert made.shape_growth(config(8, amp="bf16")) == ShapeGrowth(bytes_per_shape=9.0)
    assert made.shape_growth(config(6)) == ShapeGrowth(bytes_per_shape=3.0)
    assert made.shape_growth(config(12)) is None is made.shape_growth(config(6, amp="bf16"))
    assert made.shape_growth(config(8, param_dtype="bf16")) is None  # which computes in another type, too
    bucketed = config(8, length_bucketing=True)  # whose batches are drawn otherwise
    assert made.shape_growth(bucketed) is None and made.num_shapes(bucketed) == 0


def test_a_batch_whose_steps_would_take_too_much_of_the_budget_may_not_be_probed():
    made = History(SPACE, OBJECTIVE, [trial(config(8), ran(config(8), 20.0))], longest_step_s=0.7)
    assert made.largest_batch_size == 14
    assert made.admissible()(config(12)) and not made.admissible()(config(16))
    made.append(trial(config(6), ran(config(6), 40.0), number=1))  # what is seen to be fast reaches further
    assert made.admissible()(config(16))
    of_two = replace(SPACE, world=World(size=2))  # the speed is of both processes, and a micro batch of one
    assert (
        History(of_two, OBJECTIVE, [trial(config(8), ran(config(8), 40.0))], longest_step_s=0.7).largest_batch_size
        == 14
    )
    impatient = History(SPACE, OBJECTIVE, [trial(config(8), ran(config(8), 20.0))], longest_step_s=0.01)
    assert impatient.largest_batch_size == SPACE.baseline.batch_size
    assert History(SPACE, OBJECTIVE, longest_step_s=0.01).largest_batch_size == math.inf


def test_failures_of_an_earlier_search_that_may_pass_are_not_known():
    crashed = trial(config(8), Outcome(kind=Kind.CRASHED, wall_s=0.1))
    resumed = History(SPACE, OBJECTIVE, [crashed])
    assert not resumed.known and not resumed.evidence and resumed.trials == (crashed,) and resumed.num_resumed == 1
    resumed.append(replace(crashed, number=1))
    assert resumed.known == {config(8): crashed.outcome}


def test_a_trial_that_is_infeasible_is_told_as_the_worst_feasible_score():
    slow, fast = config(4), config(8)
    assert history().worst_score == OBJECTIVE.worst()
    assert history(trial(slow, ran(slow, 10.0)), trial(fast, ran(fast, 20.0))).worst_score == 10.0


def test_what_came_before_the_last_probe_of_a_search_no_longer_counts():
    stages = ["search", "play-off", "search", "play-off", "play-off"]
    of = config(8)
    found = [trial(of, OOM if n == 0 else ran(of, 9.0), stage, n) for n, stage in enumerate(stages)]
    assert [one.number for one in feasible_each_time(found)[of]] == [2, 3, 4]
    assert feasible_each_time([found[1]]) == {of: [found[1]]}


@pytest.mark.parametrize("outcome", [OOM, ran(config(8), 9.0, 2 * LIMIT_BYTES)])
def test_a_config_that_failed_since_its_last_probe_of_a_search_is_not_feasible(outcome):
    of = config(8)
    assert feasible_each_time([trial(of, ran(of, 9.0)), trial(of, outcome, "play-off", 1)]) == {}


def test_a_time_out_of_the_play_off_tells_nothing_where_the_machine_stood_still():
    late = Outcome(kind=Kind.TIMEOUT, cause="ended after 2 micro steps", wall_s=4.0)
    one, other = config(8), config(16)
    played = [(one, ran(one, 20.0), 0), (other, ran(other, 10.0), 0), (one, late, 1), (other, late, 1)]
    found = [trial(one, ran(one, 20.0)), trial(other, ran(other, 10.0))]
    found += [replace(trial(of, outcome, "play-off"), round=number) for of, outcome, number in played]
    known = history(*found)
    assert not known.failed_again and known.best[0] == one and late not in [outcome for _, outcome in known.evidence]
    assert feasible_each_time(known.trials).keys() == {one, other}
    assert history(*found[:2], replace(found[4], round=0)).failed_again == {one: late}


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


def test_what_was_probed_elsewhere_in_the_order_counts_as_if_it_had_been_probed_there():
    first, late, again = config(4), config(8), config(16)
    known = history(*(trial(of, ran(of, 100.0)) for of in (first, first, late, again)))
    assert list(known.known) == [first, late, again]
    other = known.as_if_probed_after(1, first)
    assert [(one.config, one.number) for one in other.trials] == [(late, 2), (first, 0), (first, 1), (again, 3)]
    assert list(other.known) == [late, first, again]
    assert [one.number for one in known.trials] == [0, 1, 2, 3]
