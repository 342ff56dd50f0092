"""What the play-off's figures say: a common variance, chances, and the search's figures without the winner's curse."""

import math
import random

import pytest

from autotune.tuning.evidence import Evidence, Searched

SEEDS = 300


def rounds_of(generator, gains, noise, num_rounds):
    """Logarithms by config and round; the machine is faster in some rounds than in others."""
    moods = [generator.gauss(0, 0.2) for _ in range(num_rounds)]
    return {
        name: {n: math.log(gain) + mood + generator.gauss(0, noise) for n, mood in enumerate(moods)}
        for name, gain in gains.items()
    }


@pytest.mark.parametrize("noise", [0.02, 0.2])
@pytest.mark.parametrize("num_rounds", [2, 5])
def test_the_interval_covers_the_truth_whatever_the_noise(noise, num_rounds):
    generator, covered = random.Random(0), 0
    for _ in range(SEEDS):
        evidence = Evidence(rounds_of(generator, {"a": 1.3, "b": 1.0}, noise, num_rounds), {})
        _, low, high = evidence.difference("a", "b").ratio()
        covered += low <= 1.3 <= high
    assert covered / SEEDS == pytest.approx(0.95, abs=0.03)


def test_the_pairs_of_all_who_play_tell_of_the_noise():
    """Two rounds of two configs leave one degree of freedom: nearly nothing. Others share the variance."""
    generator = random.Random(0)
    alone, together = [], []
    for _ in range(SEEDS):
        logs = rounds_of(generator, {"a": 1.3, "b": 1.0, "c": 0.9, "d": 1.1}, 0.1, 2)
        alone.append(Evidence({name: logs[name] for name in "ab"}, {}).difference("a", "b").chance_below(0.0) < 0.05)
        together.append(Evidence(logs, {}).difference("a", "b").chance_below(0.0) < 0.05)
    assert sum(together) > 1.5 * sum(alone)


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


def played(generator, noise):
    """Three rounds of a config and a baseline that are equal; the search had found what processes find."""
    logs = rounds_of(generator, {"best": 1.0, "base": 1.0}, noise, 3)
    return logs, {name: Searched(generator.gauss(0, noise)) for name in ("best", "base")}


def test_who_was_found_too_late_to_play_is_judged_by_the_searchs_figures():
    logs, searched = played(random.Random(0), 0.1)
    four_times = Evidence(
        logs, {**searched, "late": Searched(searched["best"].log + math.log(4), searched["best"].log)}
    )
    assert four_times.difference("late", "best").chance_below(0.0) < 0.02
    assert four_times.difference("best", "late").chance_below(0.0) > 0.98


def test_luck_of_the_one_looked_at_for_being_the_fastest_is_not_taken_for_speed():
    """The fastest of ten equal configs, found after the play-off, is hardly ever said to beat who won that."""
    generator, said, naive = random.Random(0), 0, 0
    for _ in range(SEEDS):
        logs, searched = played(generator, 0.1)
        late = sorted(generator.gauss(0, 0.1) for _ in range(10))
        bar = max(late[-2], *(found.log for found in searched.values()))
        if late[-1] > bar:
            evidence = Evidence(logs, {**searched, "late": Searched(late[-1], bar)})
            said += evidence.difference("late", "best").chance_below(0.0) < 0.05
            naive += (
                Evidence(logs, {**searched, "late": Searched(late[-1])}).difference("late", "best").chance_below(0.0)
                < 0.05
            )
    assert said / SEEDS < 0.03 and said < naive


def test_two_that_the_search_alone_ran_once_each_differ_by_no_more_than_processes_do():
    evidence = Evidence({}, {"a": Searched(math.log(1.5)), "b": Searched(0.0)})
    ratio, low, high = evidence.difference("a", "b").ratio()
    assert ratio == pytest.approx(1.5) and low < 1 < high
