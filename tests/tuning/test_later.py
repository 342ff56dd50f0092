"""What later runs of answers taught about how far a gain is repeated, and the interval that follows from it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from autotune.records.measured import NORMAL_95
from autotune.records.recheck import Recheck
from autotune.tuning.later import LEAST_STD, PRIOR_STD, later_std, widen

EXACT = (1.999, 2.001)


answers = itertools.count(1.0)


def recheck(
    seen: float, told: float = 2.0, ci: tuple[float, float] = EXACT, std: float = 0.001, answer: float | None = None
) -> Recheck:
    """A recheck of an answer of its own, or of the one that trained so many samples a second."""
    return Recheck(
        checked_at="2030-01-01T00:00:00+00:00",
        told_speedup=told,
        told_speedup_ci=ci,
        speedup=seen,
        speedup_std=std,
        samples_per_s=1.0,
        told_samples_per_s=next(answers) if answer is None else answer,
    )


def test_before_any_recheck_a_difference_between_occasions_is_assumed() -> None:
    assert later_std([]) == pytest.approx(PRIOR_STD)


@pytest.mark.parametrize("std", [0.01, 0.05, 0.15])
def test_many_rechecks_teach_how_far_this_machine_repeats_a_gain(std: float) -> None:
    draw = random.Random(0)
    seen = [recheck(2.0 * math.exp(draw.gauss(0.0, std))) for _ in range(200)]
    assert later_std(seen) == pytest.approx(std, rel=0.2)


def test_what_the_two_measurements_own_noise_explains_is_not_taken_for_a_difference_between_occasions() -> None:
    draw, noise = random.Random(0), 0.1
    ci = (2.0 * math.exp(-NORMAL_95 * noise), 2.0 * math.exp(NORMAL_95 * noise))
    seen = [recheck(2.0 * math.exp(draw.gauss(0.0, math.hypot(noise, noise))), ci=ci, std=noise) for _ in range(300)]
    assert later_std(seen) < 0.05


def test_a_gain_that_was_told_with_a_wide_interval_teaches_little() -> None:
    assert later_std([recheck(2.05, ci=(1.6, 2.5))]) == pytest.approx(PRIOR_STD, rel=0.05)
    assert later_std([recheck(2.3), recheck(2.0, ci=(1.0, 4.0))]) > PRIOR_STD


def test_many_rechecks_of_one_answer_weigh_as_much_as_one() -> None:
    once = later_std([recheck(2.2, answer=5.0)])
    assert later_std([recheck(2.2, answer=5.0) for _ in range(30)]) == pytest.approx(once)
    assert later_std([recheck(2.2) for _ in range(30)]) > 1.5 * once


def test_an_interval_that_allows_for_several_configs_and_few_rounds_is_not_taken_for_noise() -> None:
    wide = recheck(2.2, ci=(1.7, 2.35))
    assert later_std([replace(wide, told_speedup_std=0.02)]) > later_std([wide])


def test_no_machine_is_trusted_to_repeat_a_gain_exactly() -> None:
    assert later_std([recheck(2.0) for _ in range(1000)]) == pytest.approx(LEAST_STD)


def test_the_interval_holds_the_pairs_spread_and_the_difference_between_occasions() -> None:
    told, low, high = widen((2.0, 1.9, 2.2), 0.05)
    assert told == 2.0
    assert math.log(2.0 / low) == pytest.approx(math.hypot(math.log(2.0 / 1.9), NORMAL_95 * 0.05))
    assert math.log(high / 2.0) == pytest.approx(math.hypot(math.log(2.2 / 2.0), NORMAL_95 * 0.05))
    assert widen((2.0, 1.9, 2.2), 0.0) == pytest.approx((2.0, 1.9, 2.2))
