"""What rounds as a whole were above or below the others."""

import math

import pytest

from autotune.records.rounds import round_effects


def logs(**figures):
    return {name: {n: math.log(value) for n, value in values.items()} for name, values in figures.items()}


def test_rounds_that_all_ran_differ_by_what_they_have_in_common():
    effects = round_effects(logs(a={0: 100, 1: 130}, b={0: 50, 1: 65}, c={0: 10, 1: 13}))
    assert effects[1] - effects[0] == pytest.approx(math.log(1.3))
    assert sum(effects.values()) == pytest.approx(0)


def test_one_that_missed_most_rounds_is_held_against_the_others_in_its_own():
    values = logs(first=dict(enumerate([100, 100, 100, 130, 130])), late={3: 120, 4: 120})
    effects = round_effects(values)
    first, late = ([value - effects[n] for n, value in rounds.items()] for rounds in values.values())
    assert first == pytest.approx([first[0]] * 5, abs=1e-3)
    assert late[0] - first[0] == pytest.approx(math.log(120 / 130), abs=1e-3)


def test_who_ran_in_no_round_and_no_round_at_all_are_nothing_special():
    assert round_effects({"a": {0: 1.0}, "b": {}}) == {0: 0.0}
    assert round_effects({}) == {}
