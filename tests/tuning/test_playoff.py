"""The play-off: who is confirmed, who is dropped, and when the baseline is the answer."""

import random

import pytest

from autotune import techniques
from autotune.records.objective import Objective
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Dropped
from autotune.tuning.playoff import MAX_ROUNDS, MIN_ROUNDS, play_off, ratio_interval
from tests.closed_form import measurement

MIB = 2**20
OBJECTIVE = Objective(name="throughput", memory_limit_bytes=1000 * MIB, headroom=0.05)


def config(batch_size, **choices):
    return techniques.complete({"batch_size": batch_size, **choices}, global_batch=96)


BASE = config(4)
LATE = config(8)


def contest(speeds, peaks=None, noise=0.003, seed=0, rounds=MAX_ROUNDS, failing=(), substitutes=()):
    """Play off configs of given true speeds; a per-round disturbance hits all alike."""
    generator = random.Random(seed)
    log, slowdown = [], {}

    def run(candidate, number):
        log.append((number, candidate))
        if (candidate, number) in failing:
            return Outcome(kind=Kind.OOM, cause="no memory", wall_s=1.0)
        drift = slowdown.setdefault(number, generator.uniform(0.8, 1.2))
        speed = speeds[candidate] * drift * (1 + noise * generator.gauss(0, 1))
        return Outcome(
            kind=Kind.OK, measurement=measurement(candidate, speed, (peaks or {}).get(candidate, 500 * MIB)), wall_s=1.0
        )

    standing = play_off(
        [c for c in speeds if c != BASE and c not in substitutes],
        BASE if BASE in speeds else None,
        run=run,
        objective=OBJECTIVE,
        has_time=lambda seconds, number: number < rounds,
        seed=seed,
        substitutes=substitutes,
    )
    return standing, log


def test_the_fastest_wins_and_its_gain_is_paired():
    standing, _ = contest({config(8): 150.0, config(16): 200.0, BASE: 100.0})
    assert standing.answer.config == config(16)
    _, low, high = standing.gain
    assert low <= 2.0 <= high
    assert high - low < 0.1  # although rounds differ by 40 %


def test_a_substitute_comes_in_for_each_candidate_that_fails():
    speeds = {config(48): 200.0, config(24): 190.0, config(16): 150.0, config(12): 140.0, config(8): 130.0, BASE: 100.0}
    substitutes = [config(16), config(12), config(8)]
    peaks, failing = {config(24): 960 * MIB}, {(config(48), 1)}
    standing, log = contest(speeds, peaks, failing=failing, substitutes=substitutes)
    assert standing.answer.config == config(16)
    assert [min(n for n, c in log if c == candidate) for candidate in substitutes[:2]] == [1, 2]
    assert config(8) not in {candidate for _, candidate in log}
    assert standing.gain[1] > 1.3


def test_a_substitute_may_come_in_late():
    speeds = {config(48): 200.0, config(16): 150.0, BASE: 100.0}
    for number in range(MIN_ROUNDS + 2):
        standing, log = contest(speeds, noise=0.1, failing={(config(48), number)}, substitutes=[config(16)])
        assert (number + 1, config(16)) in log
        assert standing.answer.config == config(16)


def test_when_all_have_failed_and_the_time_is_up_a_substitute_still_plays():
    speeds = {config(48): 200.0, config(16): 150.0, config(12): 140.0}
    everyone_failed = {(config(48), 0), (config(16), 1)}
    standing, log = contest(speeds, failing=everyone_failed, substitutes=[config(16), config(12)], rounds=1)
    assert log == [(0, config(48)), (1, config(16)), (2, config(12))]
    assert standing.answer.config == config(12)


def test_every_entrant_runs_in_every_round_until_it_is_dropped():
    _, log = contest({config(8): 100.0, config(16): 200.0, BASE: 90.0})
    for number in range(MIN_ROUNDS):
        assert {candidate for n, candidate in log if n == number} == {config(8), config(16), BASE}


def test_the_order_within_a_round_is_shuffled():
    _, log = contest({config(8): 199.0, config(16): 200.0, BASE: 90.0}, noise=0.02)
    orders = {tuple(candidate for n, candidate in log if n == number) for number in range(MIN_ROUNDS)}
    assert len(orders) > 1


def test_losers_leave_after_the_first_rounds():
    _, log = contest({config(8): 100.0, config(16): 200.0, config(12): 199.8, BASE: 90.0}, noise=0.004)
    assert sum(candidate == config(8) for _, candidate in log) == MIN_ROUNDS


def test_on_a_tie_the_one_with_less_memory_wins():
    speeds = {config(16): 200.0, config(8): 199.5, BASE: 90.0}
    standing, _ = contest(speeds, {config(16): 800 * MIB, config(8): 400 * MIB}, noise=0.01, seed=1)
    assert standing.answer.config == config(8)


def test_on_a_tie_of_equal_memory_the_one_with_fewer_techniques_wins():
    plain, more = config(16), config(16, optimizer_impl="fused")
    standing, _ = contest({more: 200.0, plain: 199.5, BASE: 90.0}, noise=0.01, seed=1)
    assert standing.answer.config == plain


def test_the_baseline_is_the_answer_when_nothing_beats_it_beyond_the_noise():
    standings = [contest({config(8): 100.0, BASE: 100.0}, noise=0.02, seed=seed)[0] for seed in range(40)]
    kept = [standing for standing in standings if standing.answer.config == BASE]
    assert len(kept) >= 36  # a 95 % interval is wrong on this side one time in forty
    assert all(standing.gain == (1.0, 1.0, 1.0) for standing in kept)


def test_a_config_that_runs_out_of_memory_once_is_never_the_answer():
    standing, _ = contest({config(8): 150.0, config(16): 200.0, BASE: 100.0}, failing={(config(16), 1)})
    assert standing.answer.config == config(8)


def test_without_a_baseline_there_is_an_answer_and_no_gain():
    standing, _ = contest({config(8): 150.0, config(16): 200.0})
    assert standing.answer.config == config(16)
    assert standing.gain is None


def test_there_is_no_answer_when_everything_fails():
    failing = {(config(8), number) for number in range(MAX_ROUNDS)}
    standing, _ = contest({config(8): 150.0}, failing=failing)
    assert standing.answer is None


def test_the_answers_interval_is_between_processes():
    standing, _ = contest({config(16): 200.0, BASE: 100.0})
    measured = standing.answer.measured()
    assert measured.num_processes >= MIN_ROUNDS
    assert measured.samples_per_s_ci[0] < 200 < measured.samples_per_s_ci[1]
    assert measured.samples_per_s_ci[1] / measured.samples_per_s_ci[0] > 1.05  # rounds differ by up to 40 %


def test_a_ratio_interval_of_equal_values_is_a_point():
    assert ratio_interval([0.0, 0.0, 0.0]) == (1.0, 1.0, 1.0)


def test_the_ratio_interval_covers_the_truth_95_percent_of_the_time():
    generator = random.Random(0)
    covered = 0
    for _ in range(1000):
        _, low, high = ratio_interval([generator.gauss(0, 0.1) for _ in range(4)])
        covered += low <= 1 <= high
    assert 0.93 < covered / 1000 < 0.97


def test_one_round_is_enough_for_a_large_gain_and_not_for_a_small_one():
    standing, _ = contest({config(16): 300.0, BASE: 100.0}, rounds=1)
    assert standing.answer.config == config(16)
    standing, _ = contest({config(16): 110.0, BASE: 100.0}, rounds=1)
    assert standing.answer.config == BASE


def test_a_proven_gain_is_not_given_up_for_a_cheaper_config_that_has_not_proven_one():
    generator = random.Random(0)
    speeds, noise = {config(16): 102.5, config(8): 101.5, BASE: 100.0}, {config(8): 0.03}
    peaks = {config(16): 800 * MIB, config(8): 400 * MIB}

    def run(candidate, number):
        speed = speeds[candidate] * (1 + noise.get(candidate, 0.0003) * generator.gauss(0, 1))
        found = measurement(candidate, speed, peaks.get(candidate, 500 * MIB))
        return Outcome(kind=Kind.OK, measurement=found, wall_s=1.0)

    standing = play_off(
        [config(16), config(8)], BASE, run=run, objective=OBJECTIVE, has_time=lambda seconds, number: True, seed=0
    )
    assert standing.answer.config == config(16)
    assert standing.gain[1] > 1


def test_with_the_objective_memory_speed_is_compared_in_pairs_and_not_with_the_search():
    """The machine may be slower by now than when the search measured the baseline."""
    objective = Objective(
        name="memory", memory_limit_bytes=1000 * MIB, headroom=0.05, baseline_samples_per_s=200.0
    )  # twice what the play-off sees
    speeds = {config(2): 99.0, config(1): 60.0, BASE: 100.0}
    peaks = {config(2): 300 * MIB, config(1): 200 * MIB, BASE: 500 * MIB}

    def run(candidate, number):
        return Outcome(
            kind=Kind.OK, measurement=measurement(candidate, speeds[candidate], peaks[candidate]), wall_s=1.0
        )

    standing = play_off(
        [config(2), config(1)], BASE, run=run, objective=objective, has_time=lambda seconds, number: True, seed=0
    )
    assert standing.answer.config == config(2)
    assert standing.baseline is not None


def interrupted_after(num_runs, seed=0):
    """A play-off of two configs and the baseline that ends after so many runs."""
    speeds = {config(8): 150.0, config(16): 200.0, BASE: 100.0}
    log = []

    def run(candidate, number):
        if len(log) == num_runs:
            return None
        log.append(candidate)
        return Outcome(kind=Kind.OK, measurement=measurement(candidate, speeds[candidate], 500 * MIB), wall_s=1.0)

    return play_off(
        [config(16), config(8)], BASE, run=run, objective=OBJECTIVE, has_time=lambda seconds, number: True, seed=seed
    )


def test_without_a_whole_round_there_is_no_play_off():
    """Otherwise who did not come to run, the baseline say, would look as if it could not."""
    assert [interrupted_after(num, seed) for num in range(3) for seed in range(5)] == [None] * 15


def test_a_round_that_was_cut_short_takes_nothing_from_those_before():
    for num_runs in (3, 4, 5):
        standing = interrupted_after(num_runs)
        assert standing.num_rounds == 1 and standing.baseline.config == BASE
        assert standing.answer.config == config(16)


def test_without_a_baseline_that_runs_through_the_answer_is_the_best_of_the_others():
    standing, _ = contest({config(8): 150.0, BASE: 100.0}, failing={(BASE, 0)})
    assert (standing.answer.config, standing.baseline, standing.gain) == (config(8), None, None)


def test_a_substitute_comes_in_for_a_baseline_that_fails_alone():
    standing, _ = contest({config(8): 80.0, BASE: 100.0}, failing={(BASE, 0)}, substitutes=[config(8)])
    assert standing.answer.config == config(8)


def test_a_finalist_that_failed_says_so_and_one_that_lost_does_not():
    speeds = {config(8): 100.0, config(12): 190.0, config(16): 200.0, config(24): 210.0, BASE: 90.0}
    failing = {(config(24), 0), (config(12), 1)}
    standing, _ = contest(speeds, failing=failing)
    found = {entrant.config: entrant.finalist() for entrant in standing.entrants}
    reasons = {candidate: measured.dropped for candidate, measured in found.items() if isinstance(measured, Dropped)}
    assert reasons == {config(12): "oom: no memory", config(24): "oom: no memory"}
    assert found[config(24)].num_processes == 0 and found[config(24)].samples_per_s == 0
    assert found[config(12)].num_processes == 1 and found[config(12)].samples_per_s > 0


def held(speeds, failing, end, substitutes=(LATE,), baseline=BASE, seed=0):
    """A play-off with given figures by round; it ends before the run (config, round) `end`."""

    def run(candidate, number):
        if (candidate, number) == end:
            return None
        if (candidate, number) in failing:
            return Outcome(kind=Kind.OOM, cause="no memory", wall_s=1.0)
        found = measurement(candidate, speeds[candidate][number], 500 * MIB)
        return Outcome(kind=Kind.OK, measurement=found, wall_s=1.0)

    return play_off(
        [candidate for candidate in speeds if candidate not in substitutes and candidate != baseline],
        baseline,
        run=run,
        objective=OBJECTIVE,
        has_time=lambda seconds, number: number < 5,
        seed=seed,
        substitutes=substitutes,
    )


@pytest.mark.parametrize("baseline", [BASE, None])
def test_who_comes_in_when_the_machine_has_become_faster_does_not_win_by_that(baseline):
    first, late, fails = config(16), LATE, config(48)
    speeds = {
        first: [100, 100, 100, 130, 130],
        late: [0, 0, 0, 120, 120],
        fails: [100, 101, 100, 0, 0],
        BASE: [50, 50.1, 50, 65, 65],
    }
    standing = held({c: speeds[c] for c in speeds if c != BASE or baseline}, {(fails, 2)}, None, baseline=baseline)
    assert [list(e.outcomes) for e in standing.entrants if e.config == late] == [[3, 4]]
    assert standing.answer.config == first


def test_a_round_that_was_cut_in_the_middle_favours_nobody():
    """The last round is a fast one, and only some had their turn in it."""
    better, other = config(16), config(8)
    speeds = {better: [100, 100, 130], other: [97.5, 97.5, 126.75], BASE: [50, 50, 65]}
    for seed in range(6):
        assert held(speeds, (), (better, 2), substitutes=(), seed=seed).answer.config == better


def test_a_proven_gain_is_not_given_up_for_a_leader_that_has_run_once():
    first, late, fails = config(16), LATE, config(48)
    speeds = {
        first: [112, 112, 112, 112, 112],
        late: [0, 0, 0, 0, 120],
        fails: [112, 112, 112, 112, 0],
        BASE: [100, 101, 100, 101, 100],
    }
    assert held(speeds, {(fails, 3)}, None).answer.config == first
