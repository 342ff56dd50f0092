"""What the play-off's figures say: a common variance, chances, and the search's figures without the winner's curse.

What is told of those who played: speeds that processes of theirs measured, and gains that are ratios of such speeds.
"""

import math
import random
from functools import partial

import pytest

from autotune.tuning.entrant import Entrant
from autotune.tuning.evidence import Evidence, Noise, Searched, within_measured
from autotune.tuning.playoff import PlayOff
from tests.benchmarks.play_off import OtherWork, World, answer_of, never_measured
from tests.tuning.test_playoff import BASE, OBJECTIVE, OTHERS_WORKED, config, ok

SEEDS = 300
FAST = config(16)
UNSEEN = Noise.of({}).stds.tolist()  # standard deviations between processes, before any was seen
SLOWED_2X = 2 * math.log(2)  # `unrest` of a process of whose time others held half


def rounds_of(generator, gains, noise, num_rounds):
    """Logarithms by config and round; the machine is faster in some rounds than in others."""
    moods = [generator.gauss(0, 0.2) for _ in range(num_rounds)]
    return {
        name: {n: math.log(gain) + mood + generator.gauss(0, noise) for n, mood in enumerate(moods)}
        for name, gain in gains.items()
    }


def covered(noise, num_rounds):
    """Share of the intervals that hold the truth."""
    generator, num = random.Random(0), 0
    for _ in range(SEEDS):
        evidence = Evidence(rounds_of(generator, {"a": 1.3, "b": 1.0}, noise, num_rounds), {})
        _, low, high = evidence.difference("a", "b").ratio()
        num += low <= 1.3 <= high
    return num / SEEDS


@pytest.mark.parametrize(("noise", "num_rounds"), [(0.02, 2), (0.02, 5), (0.1, 2), (0.1, 5), (0.2, 5)])
def test_the_interval_covers_the_truth_whatever_the_noise(noise, num_rounds):
    assert covered(noise, num_rounds) >= 0.9


def test_over_machines_as_the_prior_has_them_the_interval_covers_the_truth_as_often_as_it_says():
    generator, num = random.Random(0), 0
    for _ in range(2 * SEEDS):
        noise = float(generator.choice(UNSEEN))
        logs = rounds_of(generator, {"a": 1.3, "b": 1.0}, noise, generator.choice([1, 2, 3, 5]))
        _, low, high = Evidence(logs, {}).difference("a", "b").ratio()
        num += low <= 1.3 <= high
    assert num / SEEDS / 2 == pytest.approx(0.95, abs=0.03)


SEEN = (0.01, 0.014, 0.018, 0.023, 0.024, 0.036, 0.054, 0.076, 0.08, 0.277)  # in ten searches of 45 s


@pytest.mark.parametrize("num_rounds", [1, 2, 3])
def test_over_searches_as_they_were_seen_the_interval_covers_the_truth(num_rounds):
    assert sum(covered(noise, num_rounds) for noise in SEEN) / len(SEEN) >= 0.95


def test_of_a_disturbed_round_more_rounds_tell_more():
    logs = {"a": {0: 0.1, 1: 0.1}, "b": {0: 0.0, 1: 0.0}}
    calm, disturbed = (Evidence(logs, {}, unrest).share_of_rounds("a", "b", 1) for unrest in ({}, {"b": {0: 0.7}}))
    assert disturbed > calm + 0.1


def test_a_disturbance_widens_by_what_it_may_have_moved_however_little_processes_differ():
    logs = {"a": {0: math.log(2.0)}, "b": {0: 0.0}}
    _, low, high = Evidence(logs, {}, {"b": {0: 0.7}}).difference("a", "b").ratio()
    assert 2 * 1.96 * 0.7 < math.log(high / low) < 1.3 * 2 * 1.96 * 0.7


def test_two_rounds_tell_little_of_a_machine_that_is_noisier_than_nearly_all():
    """At a noise of 20 % one pair often agrees by chance, and machines as calm as that are the more usual ones."""
    assert covered(0.2, 2) >= 0.8


def test_few_rounds_on_a_calm_machine_decide():
    """Without the prior one degree of freedom would leave the gain open in half of these."""
    generator, decided = random.Random(0), 0
    for _ in range(SEEDS):
        evidence = Evidence(rounds_of(generator, {"a": 1.3, "b": 1.0}, 0.03, 2), {})
        decided += evidence.difference("a", "b").ratio()[1] > 1
    assert decided / SEEDS > 0.85


def test_the_pairs_of_all_who_play_tell_of_the_noise():
    """Two rounds of two configs leave one degree of freedom: nearly nothing. Others share the variance."""
    generator, narrower = random.Random(0), 0
    for _ in range(SEEDS):
        logs = rounds_of(generator, {"a": 1.3, "b": 1.0, "c": 0.9, "d": 1.1}, 0.02, 2)
        (_, *alone), (_, *together) = (
            Evidence({name: logs[name] for name in names}, {}).difference("a", "b").ratio() for names in ("ab", "abcd")
        )
        narrower += together[1] / together[0] < alone[1] / alone[0]
    assert narrower / SEEDS > 0.75


def test_more_rounds_are_worth_more_up_to_what_knowing_all_is_worth():
    logs = {"a": {0: 0.02, 1: -0.02, 2: 0.03}, "b": {0: 0.0, 1: 0.0, 2: 0.0}}
    evidence = Evidence(logs, {})
    behind = evidence.difference("b", "a")
    shares = [evidence.share_of_rounds("b", "a", num_rounds) for num_rounds in (1, 4, 16)]
    worth = [behind.upside_seen(share) for share in (0.0, *shares, 1.0)]
    assert worth == sorted(worth) and worth[0] == max(behind.mean, 0.0) < worth[1]


def test_what_only_a_sure_gain_makes_the_answer_is_worth_little_before_it_can_be_sure():
    ahead = Evidence({"a": {0: 0.3, 1: 0.1}, "b": {0: 0.0, 1: 0.0}}, {}).difference("a", "b")
    assert ahead.upside_seen(0.1, doubts=1.6449) < ahead.upside_seen(0.9, doubts=1.6449) < ahead.upside_seen(1.0)


def test_one_round_tells_of_a_large_gain_only():
    assert Evidence({"a": {0: math.log(3.0)}, "b": {0: 0.0}}, {}).difference("a", "b").chance_below(0.0) < 0.05
    assert Evidence({"a": {0: math.log(1.1)}, "b": {0: 0.0}}, {}).difference("a", "b").chance_below(0.0) > 0.05


def test_who_missed_a_round_is_not_judged_by_the_mood_of_the_machine():
    logs = {"a": {0: 0.0, 1: 0.0, 2: 0.3}, "b": {0: 0.1, 1: 0.1}}
    assert Evidence(logs, {}).levels["b"] - Evidence(logs, {}).levels["a"] == pytest.approx(0.1)


def best_of_many(generator, noise, num_rounds):
    """The best of ten equal configs by one figure each plays against an equal baseline."""
    found = sorted(generator.gauss(0, noise) for _ in range(10))
    searched = {"best": Searched(found[-1], bar=found[-2]), "base": Searched(generator.gauss(0, noise))}
    return rounds_of(generator, {"best": 1.0, "base": 1.0}, noise, num_rounds), searched


@pytest.mark.parametrize("num_rounds", [2, 5])
def test_the_search_counts_and_its_luck_does_not(num_rounds):
    generator, too_high, narrower, naive = random.Random(0), 0, 0, 0
    for _ in range(SEEDS):
        logs, searched = best_of_many(generator, 0.1, num_rounds)
        _, low, high = Evidence(logs, searched).difference("best", "base").ratio()
        _, without_low, without_high = Evidence(logs, {}).difference("best", "base").ratio()
        taken_for_true = {name: Searched(found.log) for name, found in searched.items()}
        naive += Evidence(logs, taken_for_true).difference("best", "base").ratio()[1] > 1
        too_high += low > 1
        narrower += high / low < without_high / without_low
    assert too_high / SEEDS < 0.04 and too_high < naive
    assert narrower / SEEDS > 0.5


@pytest.mark.parametrize("gain", [1.4, 0.7])
def test_figures_of_the_search_that_the_rounds_contradict_count_for_little(gain):
    """The machine was three times as fast when the search measured the baseline."""
    logs = rounds_of(random.Random(0), {"best": gain, "base": 1.0}, 0.02, 3)
    searched = {"best": Searched(math.log(gain)), "base": Searched(math.log(3.0))}
    ratio, low, high = Evidence(logs, searched).difference("best", "base").ratio()
    assert ratio == pytest.approx(gain, rel=0.05) and low < gain < high


def rounds_and_searched(generator, noise):
    """Three rounds of a config and a baseline that are equal; the search had found what processes find."""
    logs = rounds_of(generator, {"best": 1.0, "base": 1.0}, noise, 3)
    return logs, {name: Searched(generator.gauss(0, noise)) for name in ("best", "base")}


def test_who_was_found_too_late_to_play_is_judged_by_the_searchs_figures():
    logs, searched = rounds_and_searched(random.Random(0), 0.1)
    four_times = Evidence(
        logs, {**searched, "late": Searched(searched["best"].log + math.log(4), searched["best"].log)}
    )
    assert four_times.difference("late", "best").chance_below(0.0) < 0.02
    assert four_times.difference("best", "late").chance_below(0.0) > 0.98


def test_luck_of_the_one_looked_at_for_being_the_fastest_is_not_taken_for_speed():
    """The fastest of ten equal configs, found after the play-off, is hardly ever said to beat who won that."""
    generator, said, naive = random.Random(0), 0, 0
    for _ in range(SEEDS):
        logs, searched = rounds_and_searched(generator, 0.1)
        late = sorted(generator.gauss(0, 0.1) for _ in range(10))
        bar = max(late[-2], *(found.log for found in searched.values()))
        if late[-1] > bar:
            evidence = Evidence(logs, {**searched, "late": Searched(late[-1], bar)})
            said += evidence.difference("late", "best").chance_below(0.0) < 0.05
            naive += (
                Evidence(logs, {**searched, "late": Searched(late[-1])}).difference("late", "best").chance_below(0.0)
                < 0.05
            )
    assert said / SEEDS < 0.05 and said < naive


def test_two_that_the_search_alone_ran_once_each_differ_by_no_more_than_processes_do():
    evidence = Evidence({}, {"a": Searched(math.log(1.5)), "b": Searched(0.0)})
    ratio, low, high = evidence.difference("a", "b").ratio()
    assert ratio == pytest.approx(1.5) and low < 1 < high


def played(rounds, searched=(), probes=()):
    """A play-off with given outcomes by round, or what makes them, after a search that found given figures."""
    found, probes = dict(searched), dict(probes)

    def run(of, number):
        outcome = rounds[number][of]
        return outcome() if callable(outcome) else outcome

    def entrant(of):
        return Entrant(of, found.get(of), probe=probes.get(of))

    made = PlayOff(entrant(BASE), run, OBJECTIVE, seed=0)
    for of in rounds[0]:
        if of != BASE:
            made.enter(entrant(of))
    return made.play(lambda seconds, number: number < len(rounds))


def test_a_disturbed_baseline_of_the_search_does_not_raise_what_is_told():
    """313 samples/s and 2.61x were told where 241 and 237 were seen, and 120 beside them."""
    for noticed in (True, False):
        standing = played(
            [{FAST: ok(FAST, 237.0), BASE: ok(BASE, 120.0)}],
            {FAST: Searched(math.log(241.0)), BASE: Searched(math.log(59.0), unrest=SLOWED_2X * noticed)},
            {FAST: ok(FAST, 241.0), BASE: ok(BASE, 59.0, **(OTHERS_WORKED if noticed else {}))},
        )
        assert standing.answer.config == FAST
        assert standing.figures[FAST].samples_per_s == pytest.approx(237)
        assert standing.figures[BASE].samples_per_s == pytest.approx(120)
        ratio, low, high = standing.speedup
        assert ratio == pytest.approx(237 / 120) and low < ratio < high
        assert (high < 4) is noticed


def test_a_baseline_that_was_disturbed_in_the_only_round_is_told_by_its_probe_in_the_search():
    standing = played(
        [{FAST: ok(FAST, 237.0), BASE: ok(BASE, 59.0, **OTHERS_WORKED)}],
        {FAST: Searched(math.log(241.0)), BASE: Searched(math.log(120.0))},
        {FAST: ok(FAST, 241.0), BASE: ok(BASE, 120.0)},
    )
    assert standing.figures[BASE].samples_per_s == pytest.approx(120)
    assert standing.speedup[0] == pytest.approx(237 / 120)
    assert standing.figures[BASE].by_probe and not standing.figures[FAST].by_probe


def test_where_the_only_process_of_the_baseline_was_disturbed_little_is_known_of_the_gain():
    standing = played([{FAST: ok(FAST, 120.0), BASE: ok(BASE, 59.0, **OTHERS_WORKED)}])
    assert standing.answer.config == BASE
    _, low, high = standing.speedup
    assert low < 0.5 and high > 8
    low, high = standing.figures[BASE].samples_per_s_ci
    assert low < 59 and high > 2 * 59


def test_a_disturbed_process_among_others_changes_next_to_nothing():
    calm = [{FAST: ok(FAST, 240.0 + n), BASE: ok(BASE, 121.0 - n)} for n in range(3)]
    without = played(calm).speedup
    disturbed = {FAST: ok(FAST, 242.0), BASE: ok(BASE, 59.0, **OTHERS_WORKED)}
    assert played([calm[0], disturbed, *calm[1:]]).speedup == pytest.approx(without, rel=0.01)


def test_a_little_disturbed_process_counts_for_more_than_a_much_disturbed_one():
    logs = {"a": {n: math.log(2) for n in range(4)}, "b": {0: 0.01, 1: -0.01, 2: 0.0, 3: -0.5}}

    def gain(unrest):
        return Evidence(logs, {}, {"b": {3: unrest}}).difference("a", "b").mean

    assert math.log(2) < gain(0.7) < gain(0.02) < gain(0.0)


def test_on_a_machine_that_is_always_disturbed_the_disturbance_is_the_noise():
    logs = {"a": {0: 0.7, 1: 0.75, 2: 0.65}, "b": {0: 0.0, 1: 0.05, 2: 0.06}}
    always = Evidence(logs, {}, {key: dict.fromkeys(range(3), 1.0) for key in logs})
    assert always.difference("a", "b").ratio() == Evidence(logs, {}).difference("a", "b").ratio()


def test_who_has_not_played_is_held_against_a_search_whose_baseline_was_disturbed_with_doubt():
    logs = {
        "best": {n: math.log(237) for n in range(3)},
        "base": {0: math.log(120), 1: math.log(119), 2: math.log(121)},
    }
    slowed = Searched(math.log(59), unrest=SLOWED_2X)
    found = {"best": slowed, "base": slowed, "late": Searched(math.log(241))}
    assert Evidence(logs, found).difference("late", "best").chance_below(0.0) > 0.05
    calm = {**found, "best": Searched(math.log(120)), "base": Searched(math.log(60))}
    assert Evidence(logs, calm).difference("late", "best").chance_below(0.0) < 0.05


@pytest.mark.parametrize(
    ("measured", "gains", "told"),
    [
        ({"a": (1.9, 2.1)}, {"a": 2.0}, {"base": 0.0, "a": 2.0}),  # as estimated
        ({"a": (1.9, 2.1)}, {"a": 2.15}, {"base": -0.05, "a": 2.1}),  # the baseline's own range leaves room
        ({"a": (1.9, 2.1)}, {"a": 3.0}, {"base": -0.1, "a": 2.1}),  # more than any two processes showed
        ({"a": (1.9, 2.1)}, {"a": 1.0}, {"base": 0.1, "a": 1.9}),  # and less
        ({"a": (1.9, 2.1), "b": (1.0, 1.1)}, {"a": 2.0, "b": 0.95}, {"base": 0.05, "a": 2.05, "b": 1.0}),
        (
            {"a": (1.9, 2.1), "b": (1.0, 1.1)},
            {"a": 2.0, "b": 5.0},
            {"base": -0.1, "a": 1.9, "b": 1.1},
        ),  # the first counts
    ],
)
def test_the_nearest_that_was_measured_is_told(measured, gains, told):
    found = within_measured({"base": (-0.1, 0.1), **measured}, "base", 0.0, gains)
    assert found == pytest.approx(told)


@pytest.mark.parametrize("unseen", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(20))
def test_no_speed_is_told_that_no_undisturbed_process_measured(seed, unseen):
    """As `make bench-play-off BENCH_ARGS='--disturbed 200'` finds of whole searches. Few rounds, and much is disturbed."""
    generator, work = random.Random(f"{seed} {unseen}"), OtherWork(seen=0.4, unseen=unseen, seed=seed)
    true = {BASE: 100.0, FAST: 150.0, config(8): 120.0}

    def process(of):
        return work.beside(of, ok(of, true[of] * math.exp(generator.gauss(0, 0.1))))

    probes = {of: process(of) for of in true}
    rounds = [{of: partial(process, of) for of in true} for _ in range(1 + seed % 4)]
    seen = {of: bool(probe.disturbances) for of, probe in probes.items()}
    searched = {
        of: Searched(math.log(probe.measurement.samples_per_s), unrest=seen[of]) for of, probe in probes.items()
    }
    standing = played(rounds, searched, probes)
    for of, figures in standing.figures.items():
        measured = work.measured(of)
        assert figures.samples_per_s <= max(measured) * (1 + 1e-9)
        assert figures.samples_per_s >= min(measured) * (1 - 1e-9) or unseen
    told, base = (standing.figures[of].samples_per_s for of in (standing.candidate.config, BASE))
    ratio, low, high = standing.speedup
    assert ratio == pytest.approx(told / base) and low <= ratio <= high


class TheBaselineFirst(OtherWork):
    """Slows the search's probe of the baseline, and the second one that it runs because of that."""

    def beside(self, config, outcome):
        self.seen = 1.0 if not self.disturbed or len(self.disturbed[BASE]) < 2 else 0.0
        return super().beside(config, outcome)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_whole_search_with_time_for_one_round_tells_what_it_measured(seed):
    work = TheBaselineFirst()
    result = answer_of(World(noise=0.05, gain=2.0, seed=seed, work=work), 10.0, seed)
    assert [*work.disturbed] == [BASE] and result.num_rounds == 1
    assert never_measured(result, work) == []
    assert str(result).startswith("faster in the one round there was time for: ")


def test_a_search_without_a_round_tells_a_disturbed_baseline_with_doubt():
    work = TheBaselineFirst()
    result = answer_of(World(noise=0.05, gain=2.0, work=work), 5.5, 0)
    assert not result.confirmed and result.num_rounds == 0 and result.verdict == "undecided"
    low, high = result.baseline.samples_per_s_ci
    assert low < result.baseline.samples_per_s < high and high > min(work.disturbed[BASE]) * 1.5
    assert result.speedup > 2 and result.speedup_ci[0] < 1 and str(result).startswith("probably faster: ")
