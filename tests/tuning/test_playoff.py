"""The play-off: who is confirmed, who is dropped, and when the baseline is the answer."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.records.measured import Dropped
from autotune.records.objective import Memory, Objective, Throughput
from autotune.records.outcome import Kind, Outcome
from autotune.records.study import PLAY_OFF, Trial
from autotune.study.figures import ratio_interval
from autotune.techniques import find_techniques
from autotune.tuning.entrant import Entrant
from autotune.tuning.evidence import Evidence, Searched
from autotune.tuning.guest import NUM_ROUNDS, Guest
from autotune.tuning.playoff import MAX_ROUNDS, MIN_ROUNDS, SHORTEST_TIMED_S, WIDE, PlayOff
from tests.closed_form import measurement

techniques = find_techniques()

MIB = 2**20
OBJECTIVE = Throughput(memory_limit_bytes=1000 * MIB, headroom=0.05)


def config(batch_size, **choices):
    return techniques.complete({"batch_size": batch_size, **choices}, global_batch=96)


BASE = config(4)
LATE = config(8)


MANY = 12
OTHERS_WORKED = {"contention": 0.5, "disturbances": ("others held the processor for 50% of the time",)}


def play_off(candidates, baseline, *, run, objective, has_time, seed, substitutes=()):
    made = PlayOff(Entrant(baseline) if baseline else None, run, objective, seed=seed)
    for candidate in candidates:
        made.enter(Entrant(candidate))
    return made.play(has_time, substitutes=map(Entrant, substitutes))


def contest(speeds, peaks=None, noise=0.003, seed=0, rounds=MANY, failing=(), substitutes=()):
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


def test_where_the_first_round_of_all_takes_too_long_the_best_plays_against_the_baseline():
    log = []

    def run(candidate, number):
        log.append(candidate)
        return Outcome(kind=Kind.OK, measurement=measurement(candidate, 100.0, 500 * MIB), wall_s=1.0)

    made = PlayOff(Entrant(BASE, None, 1.0), run, OBJECTIVE, seed=0)
    for candidate in (config(24), config(16), config(8)):
        made.enter(Entrant(candidate, None, 1.0))
    standing = made.play(lambda seconds, number: seconds <= 2.0 and number == 0)
    assert standing is not None and standing.num_rounds == 1
    assert sorted(log, key=lambda one: one.batch_size) == [BASE, config(24)]


def test_the_same_file_searched_again_and_again_gets_the_same_answer_though_processes_differ_by_12_percent():
    speeds = {config(8): 130.0, BASE: 100.0}
    standings = [contest(speeds, noise=0.12, seed=seed, rounds=8)[0] for seed in range(20)]
    assert sum(standing.answer.config == config(8) for standing in standings) >= 19


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


@pytest.mark.parametrize("slow_s", [2.0, 100.0])
def test_a_substitute_takes_no_round_from_the_leader_where_time_is_short(slow_s):
    speeds = {config(24): 195.0, config(16): 200.0, config(8): 190.0, config(1): 300.0, BASE: 100.0}
    log = []

    def run(candidate, number):
        log.append((number, candidate))
        if candidate == config(24) and number == 1:
            return Outcome(kind=Kind.OOM, cause="no memory", wall_s=1.0)
        speed = speeds[candidate] * (1 + 0.02 * (-1) ** number * (candidate == BASE))
        return Outcome(kind=Kind.OK, measurement=measurement(candidate, speed, 500 * MIB), wall_s=1.0)

    made = PlayOff(Entrant(BASE, wall_s=1.0), run, OBJECTIVE, seed=0)
    for candidate in (config(24), config(16), config(8)):
        made.enter(Entrant(candidate, wall_s=1.0))
    slow = Entrant(config(1), wall_s=slow_s)
    made.play(lambda seconds, number: seconds <= 3 + (number < 2) and number < 4, substitutes=[slow])
    assert slow in made.entrants and not slow.outcomes
    assert {candidate for number, candidate in log if number == 2} == {config(16), config(8), BASE}


def test_when_all_have_failed_and_the_time_is_up_a_substitute_still_plays():
    speeds = {config(48): 200.0, config(16): 150.0, config(12): 140.0}
    everyone_failed = {(config(48), 0), (config(16), 1)}
    standing, log = contest(speeds, failing=everyone_failed, substitutes=[config(16), config(12)], rounds=1)
    assert log == [(0, config(48)), (1, config(16)), (2, config(12))]
    assert standing.answer.config == config(12)


def test_where_processes_are_alike_every_entrant_runs_in_every_round_until_it_is_dropped():
    _, log = contest({config(8): 198.0, config(16): 200.0, BASE: 90.0}, noise=0.005)
    for number in range(MIN_ROUNDS):
        assert {candidate for n, candidate in log if n == number} == {config(8), config(16), BASE}


def test_where_processes_differ_the_leader_and_the_baseline_play_most_rounds():
    """Which of the others is a little faster cannot be told, and the gain can."""
    for seed in range(5):
        _, log = contest({config(8): 198.0, config(12): 199.0, config(16): 200.0, BASE: 90.0}, noise=0.1, seed=seed)
        ran = {candidate: sum(one == candidate for _, one in log) for candidate in {one for _, one in log}}
        of_all = [n for n in range(MANY) if sum(number == n for number, _ in log) == len(ran)]
        assert of_all[0] == 0 and 1 < len(of_all) < MANY / 2
        assert ran[BASE] == MANY and all(count >= len(of_all) for count in ran.values())


def test_the_order_within_a_round_is_shuffled():
    _, log = contest({config(8): 199.0, config(16): 200.0, BASE: 90.0}, noise=0.02)
    orders = {tuple(candidate for n, candidate in log if n == number) for number in range(MIN_ROUNDS)}
    assert len(orders) > 1


def test_losers_leave_after_the_first_rounds():
    _, log = contest({config(8): 100.0, config(16): 200.0, config(12): 199.8, BASE: 90.0}, noise=0.004)
    assert sum(candidate == config(8) for _, candidate in log) < MIN_ROUNDS
    assert sum(candidate == config(12) for _, candidate in log) >= MIN_ROUNDS


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
    assert len(kept) >= 36
    assert all(standing.candidate.config == config(8) for standing in kept)
    covered = [standing.gain[1] <= 1 <= standing.gain[2] for standing in kept]
    assert sum(covered) >= 0.9 * len(kept)  # the others' gain is told, with its interval


def test_a_config_that_runs_out_of_memory_once_is_never_the_answer():
    standing, _ = contest({config(8): 150.0, config(16): 200.0, BASE: 100.0}, failing={(config(16), 1)})
    assert standing.answer.config == config(8)


@pytest.mark.parametrize("failing", [{config(16): 3}, {config(16): 5}, {BASE: 3, config(16): 3}])
def test_who_lost_to_one_that_then_fails_plays_on(failing):
    """However long ago that was: it is the best of those who run through."""
    speeds = {config(8): 150.0 if BASE not in failing else 50.0, config(16): 200.0, BASE: 100.0}
    standing, log = contest(speeds, noise=0.02, failing=set(failing.items()))
    assert (2, config(8)) not in log and set(failing.items()) <= {(c, n) for n, c in log}
    assert standing.answer.config == config(8)


def test_without_a_baseline_there_is_an_answer_and_no_gain():
    standing, _ = contest({config(8): 150.0, config(16): 200.0})
    assert standing.answer.config == config(16)
    assert standing.gain is None


def test_there_is_no_answer_when_everything_fails():
    failing = {(config(8), number) for number in range(MANY)}
    standing, _ = contest({config(8): 150.0}, failing=failing)
    assert standing.answer is None


def test_the_answers_interval_is_between_processes():
    standing, _ = contest({config(16): 200.0, BASE: 100.0})
    measured = standing.figures[standing.answer.config]
    assert measured.num_processes >= MIN_ROUNDS
    assert measured.samples_per_s_ci[0] < 200 < measured.samples_per_s_ci[1]
    assert measured.samples_per_s_ci[1] / measured.samples_per_s_ci[0] > 1.05  # rounds differ by up to 40 %


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("speed", [90.0, 130.0])
def test_every_figure_is_from_the_estimate_that_the_gain_is_told_by(rounds, speed):
    """What the search found counts in the gain, and one who comes in late has missed the slow first round."""

    def run(candidate, number):
        if (candidate, number) == (config(48), 0):
            return Outcome(kind=Kind.OOM, cause="no memory", wall_s=1.0)
        return ok(candidate, speeds[candidate] * (0.5 if number == 0 else 1.0 + 0.1 * (number % 2)))

    speeds = {config(16): speed, LATE: 80.0, config(48): 1.0, BASE: 100.0}
    made = PlayOff(Entrant(BASE, Searched(math.log(200.0))), run, OBJECTIVE, seed=0)
    made.enter(Entrant(config(16), Searched(math.log(150.0))))
    made.enter(Entrant(config(48)))
    standing = made.play(lambda seconds, number: number < rounds, substitutes=[Entrant(LATE)])
    told, base = standing.figures[standing.candidate.config], standing.figures[BASE]
    assert told.samples_per_s / base.samples_per_s == pytest.approx(standing.speedup[0])
    assert told.step_s == pytest.approx(96 / told.samples_per_s, rel=0.1)
    assert told.samples_per_s_ci[0] < told.samples_per_s < told.samples_per_s_ci[1]
    if rounds > 1:
        assert standing.figures[LATE].samples_per_s / base.samples_per_s == pytest.approx(0.8, rel=0.05)


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
    objective = Memory(
        memory_limit_bytes=1000 * MIB, headroom=0.05, baseline_samples_per_s=200.0
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


class Power(Objective):
    """An objective that nobody else knows of."""

    name, unit, better, help = "power", "W", "more frugal", "power: least power"
    less_is_better = True
    speed_weight = 0.0

    def figure(self, measured):
        return measured.telemetry["power_w"]

    def worst(self):
        return -1000.0


def test_the_play_off_compares_what_its_objective_says():
    powers = {config(16): 300.0, config(8): 200.0, BASE: 250.0}

    def run(candidate, number):
        found = replace(measurement(candidate, 100.0, 500 * MIB), telemetry={"power_w": powers[candidate]})
        return Outcome(kind=Kind.OK, measurement=found, wall_s=1.0)

    objective = Power(memory_limit_bytes=1000 * MIB, headroom=0.05)
    standing = play_off(
        [config(16), config(8)], BASE, run=run, objective=objective, has_time=lambda seconds, number: True, seed=0
    )
    assert standing.answer.config == config(8)
    assert standing.gain[0] == pytest.approx(1.25)
    assert standing.speedup[0] == pytest.approx(1.0)


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


def test_a_baseline_does_not_play_alone():
    assert contest({BASE: 100.0}) == (None, [])
    standing, log = contest({config(8): 50.0, BASE: 100.0})
    assert standing.answer.config == BASE and standing.candidate.config == config(8)
    assert len(log) < 2 * MIN_ROUNDS  # not even once the other has lost


def test_a_finalist_that_failed_says_so_and_one_that_lost_does_not():
    speeds = {config(8): 100.0, config(12): 190.0, config(16): 200.0, config(24): 210.0, BASE: 90.0}
    failing = {(config(24), 0), (config(12), 1)}
    standing, _ = contest(speeds, failing=failing)
    found = {entrant.config: entrant.finalist(standing.figures) for entrant in standing.entrants}
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


@pytest.mark.parametrize("baseline", [BASE, None])
def test_who_ran_in_a_round_that_was_cut_short_alone_wins_nothing_by_that(baseline):
    """The machine was faster in that round, and nobody else ran in it."""
    late, fails, speeds = LATE, config(48), {config(16): 110.0, LATE: 130.0, config(48): 112.0, BASE: 100.0}

    def run(candidate, number):
        if number == 2:
            return ok(candidate, speeds[candidate]) if candidate == late else None
        if (candidate, number) == (fails, 1):
            return Outcome(kind=Kind.OOM, cause="no memory", wall_s=1.0)
        return ok(candidate, speeds[candidate] / (100 if baseline is None else 1))

    for seed in range(6):
        first = [config(16), fails]
        standing = play_off(
            first,
            baseline,
            run=run,
            objective=OBJECTIVE,
            has_time=lambda seconds, number: True,
            seed=seed,
            substitutes=[late],
        )
        assert standing.num_rounds == 2 and standing.answer.config != late
        assert standing.candidate.config == config(16)


def ok(candidate, speed, wall_s=1.0, **changes):
    found = replace(measurement(candidate, speed, 500 * MIB), **changes)
    return Outcome(kind=Kind.OK, measurement=found, wall_s=wall_s)


def trials_of(played):
    """The trials of rounds that were played before."""
    runs = [(candidate, n, outcome) for candidate, by_round in played.items() for n, outcome in by_round.items()]
    return [
        Trial(number=number, stage=PLAY_OFF, config=candidate, outcome=outcome, feasible=True, round=n)
        for number, (candidate, n, outcome) in enumerate(runs)
    ]


def test_without_time_for_a_round_there_is_no_play_off_though_an_earlier_search_began_one():
    outcomes = {0: ok(config(8), 100.0)}
    made = PlayOff(
        Entrant(BASE, wall_s=1.0),
        lambda candidate, number: None,
        OBJECTIVE,
        seed=0,
        earlier=trials_of({config(8): outcomes}),
    )
    made.enter(Entrant(config(8), wall_s=1.0, outcomes=outcomes))
    assert made.play(lambda seconds, number: False) is None


def test_the_rounds_of_earlier_searches_count_and_what_was_disturbed_in_them_counts_for_little():
    speeds = {config(8): 150.0, BASE: 100.0}

    def go_on(**of_the_fast_one):
        earlier = {c: {n: ok(c, speed) for n in range(3)} for c, speed in speeds.items()}
        earlier[config(8)][1] = ok(config(8), 1500.0, **of_the_fast_one)
        made = PlayOff(
            Entrant(BASE, outcomes=earlier[BASE]),
            lambda candidate, number: ok(candidate, speeds[candidate]),
            OBJECTIVE,
            seed=0,
            earlier=trials_of(earlier),
        )
        made.enter(Entrant(config(8), outcomes=earlier[config(8)]))
        return made.play(lambda seconds, number: number < 1)

    assert go_on(**OTHERS_WORKED).num_rounds == 4
    assert go_on(**OTHERS_WORKED).gain[2] < 1.6 and go_on().gain[2] > 2


def test_a_proven_gain_is_not_given_up_for_a_leader_that_has_run_once():
    first, late, fails = config(16), LATE, config(48)
    speeds = {
        first: [126, 106, 124, 108, 121],
        late: [0, 0, 0, 0, 112],
        fails: [108, 120, 104, 0, 0],
        BASE: [100, 108, 92, 107, 93],
    }
    assert held(speeds, {(fails, 3)}, None).answer.config == first


@pytest.mark.parametrize(("late_speed", "wins"), [(165.0, False), (500.0, True)])
def test_who_has_run_once_when_the_time_is_up_gives_way_to_the_others_unless_it_is_beyond_doubt_better(
    late_speed, wins
):
    speeds = {config(16): 150.0, LATE: late_speed, BASE: 100.0}
    log = []

    def run(candidate, number):
        log.append(candidate)
        return ok(candidate, speeds[candidate] * (1 + 0.05 * (len(log) % 2)))

    made = PlayOff(Entrant(BASE), run, OBJECTIVE, seed=0)
    made.enter(Entrant(config(16)))
    made.play(lambda seconds, number: number < 2)
    made.enter(Entrant(LATE))
    standing = made.play(lambda seconds, number: number < 3)
    assert log.count(LATE) == 1
    assert standing.answer.config == (LATE if wins else config(16))


def test_a_proven_gain_of_who_has_run_once_is_not_given_up_for_what_is_not_proven():
    speeds = {config(16): [100.0, 103.0], LATE: [0.0, 0.0, 106.0], BASE: [100.0, 100.0, 100.0]}

    def run(candidate, number):
        return ok(candidate, speeds[candidate][number])

    made = PlayOff(Entrant(BASE), run, OBJECTIVE, seed=0)
    made.enter(Entrant(config(16)))
    made.play(lambda seconds, number: number < 2)
    assert made.stake(1) < math.inf
    made.enter(Entrant(LATE))
    speeds[config(16)].append(101.0)
    standing = made.play(lambda seconds, number: number < 3)
    assert standing.answer.config == LATE
    assert made.stake(1) == math.inf, "it is the leader, and has run once"


def test_where_there_is_no_time_for_all_who_has_not_played_yet_comes_first():
    """Who comes in late does so because it may be the best; the others have shown what they do."""
    speeds = {config(16): 150.0, config(12): 140.0, LATE: 500.0, BASE: 100.0}
    log = []

    def run(candidate, number):
        log.append(candidate)
        return ok(candidate, speeds[candidate] * (1 + 0.03 * (len(log) % 3)))

    made = PlayOff(Entrant(BASE, wall_s=1.0), run, OBJECTIVE, seed=0)
    made.enter(Entrant(config(16), wall_s=1.0))
    made.enter(Entrant(config(12), wall_s=1.0))
    made.play(lambda seconds, number: number < 1)
    made.enter(Entrant(LATE, wall_s=1.0))
    del log[:]
    standing = made.play(lambda seconds, number: not log and seconds <= 2.0)
    assert {*log} == {LATE, BASE}
    assert standing.answer.config == LATE


def test_rounds_go_on_while_the_interval_is_wide():
    noisy, _ = contest({config(8): 150.0, BASE: 100.0}, noise=0.05, rounds=100)
    assert noisy.num_rounds > 12
    gain, low, high = noisy.gain
    assert (high - low) / gain <= WIDE
    quiet, _ = contest({config(8): 150.0, BASE: 100.0}, noise=0.003, rounds=100)
    assert quiet.num_rounds == MIN_ROUNDS


def disturbed_in(numbers, num_rounds=MANY):
    """A play-off whose rounds of these numbers are disturbed: there the candidate is ten times as fast."""
    generator, speeds = random.Random(0), {config(8): 150.0, BASE: 100.0}

    def run(candidate, number):
        speed = speeds[candidate] * (1 + 0.003 * generator.gauss(0, 1))
        found = measurement(candidate, speed, 500 * MIB)
        if number in numbers:
            speed *= 10 if candidate != BASE else 1
            found = replace(found, samples_per_s=speed, disturbances=("others held the processor",))
        return Outcome(kind=Kind.OK, measurement=found, wall_s=1.0)

    return play_off(
        [config(8)], BASE, run=run, objective=OBJECTIVE, has_time=lambda seconds, number: number < num_rounds, seed=0
    )


def test_a_disturbed_round_is_played_again():
    standing = disturbed_in({1})
    assert standing.num_rounds == MIN_ROUNDS + 1
    assert standing.gain[1] < 1.5 < standing.gain[2] < 1.6


def test_without_time_to_play_it_again_a_disturbed_round_says_little():
    gain, low, high = disturbed_in({1}, num_rounds=3).gain
    assert gain == pytest.approx(1.5, rel=0.02) and low < 1.5 < high


def test_a_machine_that_is_always_disturbed_gets_an_answer():
    assert disturbed_in(range(100)).answer.config == config(8)


def timed_for_a_second(candidate, speed, within, overhead_s=1.0):
    """A process timed for a second, whose two blocks tell a speed with this standard error."""
    found = replace(measurement(candidate, speed, 500 * MIB), timed_s=1.0)
    blocks = (speed * (1 - within), speed * (1 + within))
    return Outcome(
        kind=Kind.OK, measurement=replace(found, block_samples_per_s=blocks), wall_s=found.timed_s + overhead_s
    )


def timed_after(between, within, overhead_s, same_samples=False):
    """How long a process is timed, after a few rounds with this noise between processes and within a second of one."""
    generator, speeds = random.Random(0), {config(8): 150.0, BASE: 100.0}

    def run(candidate, number):
        speed = speeds[candidate] * (1 + between * generator.gauss(0, 1))
        return timed_for_a_second(candidate, speed, within, overhead_s)

    made = PlayOff(Entrant(BASE), run, OBJECTIVE, seed=0)
    made.enter(Entrant(config(8)))
    assert made.timed_s(10.0) == SHORTEST_TIMED_S  # nothing has run
    made.play(lambda seconds, number: number < 8)
    assert made.num_samples(6.0) == pytest.approx(6 * math.sqrt(150.0 * 100.0), rel=5 * between)
    return made.timed_s(10.0, same_samples=same_samples)


def unplayed(base, candidate, **settings):
    """A play-off of a config and the baseline before its first round, with their processes in the search."""
    made = PlayOff(Entrant(BASE, probe=base, **settings), lambda candidate, number: None, OBJECTIVE, seed=0)
    made.enter(Entrant(config(8), probe=candidate, **settings))
    return made


def test_before_processes_were_seen_to_differ_the_probes_tell_how_long_to_time():
    unequal = unplayed(*(timed_for_a_second(one, 100.0, 0.08) for one in (BASE, config(8))))
    equal = unplayed(*(timed_for_a_second(one, 100.0, 0.01) for one in (BASE, config(8))))
    expected_std = Evidence({}, {}).std
    assert expected_std == pytest.approx(0.15, abs=0.02)
    assert unequal.timed_s(10.0) == pytest.approx(math.sqrt(0.08**2 / (expected_std**2 - 0.08**2)))
    assert unequal.timed_s(0.6) == 0.6
    assert equal.timed_s(10.0) == SHORTEST_TIMED_S


@pytest.mark.parametrize(
    ("left_s", "num_rounds", "timed_s"),
    [(20.0, 5, 20.0 / 5 / 2 - 1.0), (20.0, 1, 20.0 / 2 / 2 - 1.0), (5.0, 5, 5.0 / 5 / 2 - 1.0)],
)
def test_a_process_is_timed_no_longer_than_leaves_time_for_the_wanted_rounds_and_for_one_that_takes_twice_as_long(
    left_s, num_rounds, timed_s
):
    run = timed_for_a_second(BASE, 100.0, 0.08)
    made = unplayed(run, run, wall_s=1.0 + SHORTEST_TIMED_S)
    made.left_s = lambda: left_s
    assert made.affordable_timed_s(num_rounds) == pytest.approx(timed_s)


def test_how_long_processes_of_an_earlier_search_were_timed_says_nothing_of_how_long_they_take_now():
    run = timed_for_a_second(BASE, 100.0, 0.08)
    made = unplayed(run, run, wall_s=1.0 + SHORTEST_TIMED_S, outcomes={-1: run})
    made.left_s = lambda: 20.0
    assert made.affordable_timed_s(5) == pytest.approx(20.0 / 5 / 2 - 1.0)


def test_what_is_kept_for_one_device_is_not_spent_on_longer_processes():
    run = timed_for_a_second(BASE, 100.0, 0.08)
    made = unplayed(run, run, wall_s=1.0 + SHORTEST_TIMED_S)
    made.guest = SimpleNamespace(num_missing=2, wall_s=3.0)
    made.left_s = lambda: 20.0
    assert made.affordable_timed_s(5) == pytest.approx((20.0 - 6.0) / 5 / 2 - 1.0)


def test_all_processes_of_a_round_take_as_many_samples_as_the_blocks_of_each_need():
    large, small = config(24), config(8)  # of 96 samples a step
    made = PlayOff(
        Entrant(large, probe=timed_for_a_second(large, 100.0, 0.1)), lambda candidate, number: None, OBJECTIVE, seed=0
    )
    made.enter(Entrant(small, probe=timed_for_a_second(small, 160.0, 0.1)))
    assert made.num_samples(0.5) == math.ceil(2 * 0.5 * 100.0)  # six blocks of 24 would take the slower one too long
    assert made.num_samples(0.8) == 6 * 24
    assert made.num_samples(2.0) == math.ceil(2.0 * math.sqrt(100.0 * 160.0))


def test_processes_are_short_where_they_differ_and_long_where_their_blocks_do():
    assert timed_after(between=0.1, within=0.01, overhead_s=1.0) == SHORTEST_TIMED_S
    assert timed_after(between=0.01, within=0.05, overhead_s=1.0) > 2
    assert timed_after(between=0.02, within=0.02, overhead_s=16.0) > timed_after(
        between=0.02, within=0.02, overhead_s=1.0
    )


def test_where_all_time_the_same_samples_what_blocks_differ_by_makes_no_process_long():
    assert timed_after(between=0.03, within=0.1, overhead_s=1.0) == 10.0
    assert timed_after(between=0.03, within=0.1, overhead_s=1.0, same_samples=True) == pytest.approx(1.0)


def standstill(late, rounds=MANY):
    """A contest in which the machine stands still for some processes: (round, config)."""
    speeds = {config(8): 150.0, config(16): 200.0, BASE: 100.0}
    generator = random.Random(0)

    def run(candidate, number):
        if (number, candidate) in late:
            return Outcome(kind=Kind.TIMEOUT, cause="ended after 2 micro steps", wall_s=4.0)
        speed = speeds[candidate] * (1 + 0.03 * generator.gauss(0, 1))
        return Outcome(kind=Kind.OK, measurement=measurement(candidate, speed, 500 * MIB), wall_s=1.0)

    return play_off(
        [config(8), config(16)],
        BASE,
        run=run,
        objective=OBJECTIVE,
        has_time=lambda seconds, number: number < rounds,
        seed=0,
    )


@pytest.mark.parametrize("stopped", [{1}, {2, 3}], ids=["once", "for two rounds"])
def test_rounds_in_which_nobody_runs_through_take_nothing_from_the_others(stopped):
    standing = standstill({(number, of) for number in stopped for of in (config(8), config(16), BASE)}, rounds=6)
    assert standing.answer.config == config(16) and standing.gain[1] > 1.5
    assert not any(entrant.failed for entrant in (*standing.entrants, standing.baseline))


def test_one_time_out_of_a_config_that_has_run_through_is_excused_and_a_second_in_turn_is_not():
    assert standstill({(1, config(16))}).answer.config == config(16)
    standing = standstill({(1, config(16)), (2, config(16))})
    assert standing.answer.config == config(8) and "micro steps" in standing.entrants[1].failed


def test_a_config_that_never_runs_through_in_the_play_off_fails_at_its_first_time_out():
    standing = standstill({(0, config(16)), (0, BASE)}, rounds=3)
    assert standing.answer.config == config(8) and standing.baseline is None


def test_rounds_in_which_every_process_was_excused_are_not_counted():
    empty = {(number, of) for number in range(1, 6) for of in (config(8), config(16), BASE)}
    standing = standstill(empty, rounds=8)
    assert standing.num_rounds == len(standing.entrants[1].outcomes) == 3
    assert standstill(empty, rounds=6).num_rounds == 1  # as many were begun as there was time for


def test_a_machine_that_stands_still_for_good_ends_the_play_off():
    empty = {(number, of) for number in range(2, 2 * MAX_ROUNDS) for of in (config(8), config(16), BASE)}
    assert standstill(empty, rounds=10 * MAX_ROUNDS).num_rounds == 2


@pytest.mark.parametrize("comes_in", ["as a substitute", "as a challenger"])
def test_nobody_waits_for_an_entrant_that_there_is_no_time_for(comes_in):
    speeds, numbers = {config(24): 195.0, config(16): 200.0, config(8): 190.0, BASE: 100.0}, set()
    generator = random.Random(0)

    def run(candidate, number):
        numbers.add(number)
        if candidate == config(24) and number == 1:
            return Outcome(kind=Kind.OOM, cause="no memory", wall_s=1.0)
        return ok(candidate, speeds[candidate] * (1 + 0.003 * generator.gauss(0, 1)))

    made = PlayOff(Entrant(BASE, wall_s=1.0), run, OBJECTIVE, seed=0)
    for candidate in (config(24), config(16), config(8)):
        made.enter(Entrant(candidate, wall_s=1.0))
    slow = Entrant(config(1), wall_s=100.0)
    late = iter([slow] if comes_in == "as a challenger" else [])
    substitutes = [slow] if comes_in == "as a substitute" else []
    standing = made.play(lambda seconds, _: seconds <= 5, substitutes=substitutes, challenger=lambda: next(late, None))
    assert slow in made.entrants and not slow.outcomes
    assert standing.answer.config == config(16)
    assert len(numbers) < 2 * MIN_ROUNDS


def hosted(speeds, guest_speed, *, noise=0.01, rounds=MANY, round_s=math.inf):
    """A play-off with a guest: how it stands, how the guest fared, and what ran in which round."""
    generator = random.Random(0)
    log, slowdown = [], {}

    def measure(name, candidate, speed, number):
        log.append((number, name))
        drift = slowdown.setdefault(number, generator.uniform(0.8, 1.2))
        found = measurement(candidate, speed * drift * (1 + noise * generator.gauss(0, 1)), 500 * MIB)
        return Outcome(kind=Kind.OK, measurement=found, wall_s=1.0)

    guest = Guest(
        config=BASE,  # the same choices as the baseline's, on fewer devices
        run=lambda candidate, number: measure("guest", candidate, guest_speed, number),
        does_not_fit=OBJECTIVE.does_not_fit,
        smaller=lambda candidate: None,
        wall_s=1.0,
    )
    made = PlayOff(
        Entrant(BASE, wall_s=1.0),
        lambda candidate, number: measure(candidate, candidate, speeds[candidate], number),
        OBJECTIVE,
        seed=0,
        guest=guest,
    )
    for candidate in speeds:
        made.enter(Entrant(candidate, wall_s=1.0))
    standing = made.play(lambda seconds, number: seconds <= round_s and number < rounds)
    return standing, made, log


def test_a_guest_runs_in_the_first_rounds_and_is_compared_within_them():
    _, made, log = hosted({config(8): 130.0, BASE: 100.0}, guest_speed=50.0)
    assert [number for number, name in log if name == "guest"] == list(range(NUM_ROUNDS))
    for candidate, gain in ((config(8), 2.6), (BASE, 2.0)):
        found, low, high = made.over_guest(candidate)
        assert found == pytest.approx(gain, rel=0.03)
        assert low <= found <= high < 1.2 * low  # although rounds differ by 40 %


def test_a_guest_takes_its_turn_at_any_place_of_a_round():
    _, _, log = hosted({config(8): 130.0, BASE: 100.0}, guest_speed=50.0)
    rounds = [[name for n, name in log if n == number] for number in range(NUM_ROUNDS)]
    assert len({names.index("guest") for names in rounds}) > 1


@pytest.mark.parametrize("guest_speed", [1.0, 1000.0])
def test_however_fast_a_guest_is_the_answer_stays(guest_speed):
    standing, _, _ = hosted({config(8): 130.0, BASE: 100.0}, guest_speed)
    assert standing.answer.config == config(8)
    assert {*standing.figures} == {config(8), BASE}


def test_a_guest_takes_no_time_from_those_who_play():
    standing, made, log = hosted({config(8): 130.0, BASE: 100.0}, guest_speed=50.0, round_s=2.0)
    assert "guest" not in [name for _, name in log]
    assert standing.answer.config == config(8)
    assert made.over_guest(BASE) is None


def test_without_anybody_else_the_baseline_plays_beside_a_guest():
    standing, made, log = hosted({BASE: 100.0}, guest_speed=50.0)
    assert len(log) == 2 * NUM_ROUNDS
    assert standing.answer is standing.baseline and standing.candidate is None
    assert made.over_guest(BASE) is not None
