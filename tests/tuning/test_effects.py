"""What each change of an answer did by itself, and how sure that is."""

from dataclasses import replace

import pytest

from autotune.records.study import PLAY_OFF
from autotune.tuning.effects import effects
from tests.tuning.test_why import config, probed

ANSWER, BASELINE = config(8, amp="bf16"), config(4)
DISTURBED = {"disturbances": ("others held the processor for 40% of the time",)}


def played(candidate, samples_per_s, number, **changes):
    return replace(probed(candidate, samples_per_s, **changes), stage=PLAY_OFF, round=number)


def found(probes, answer=ANSWER):
    return {effect.technique: effect for effect in effects(answer, BASELINE, probes)}


def test_the_effect_of_a_technique_comes_from_probes_that_differ_in_it_alone():
    probes = [
        probed(ANSWER, 180, 300),
        probed(config(8), 120, 400),
        probed(config(4, amp="bf16"), 150, 250),
        probed(BASELINE, 100, 350),
    ]
    amp, batch = found(probes)["amp"], found(probes)["batch_size"]
    assert (amp.num_pairs, batch.num_pairs) == (2, 2)
    assert (amp.speed_ratio, batch.speed_ratio) == (pytest.approx(1.5), pytest.approx(1.2))
    assert amp.memory_ratio == pytest.approx((300 / 400 * 250 / 350) ** 0.5)


def test_an_effect_that_was_not_isolated_is_not_invented():
    (batch, amp) = effects(ANSWER, BASELINE, [probed(ANSWER), probed(BASELINE)])
    assert batch.num_pairs == amp.num_pairs == 0
    assert batch.speed_ratio is None and amp.memory_ratio is None and amp.speed_ratio_ci is None


def test_what_something_disturbed_does_not_count_where_there_are_others():
    probes = [
        probed(ANSWER, 180),
        probed(config(8), 120),
        probed(config(4, amp="bf16"), 400, **DISTURBED),
        probed(BASELINE, 100),
    ]
    amp, batch = found(probes)["amp"], found(probes)["batch_size"]
    assert amp.speed_ratio == pytest.approx(1.5) and (amp.num_pairs, amp.disturbed) == (1, False)
    assert batch.speed_ratio == pytest.approx(1.2)
    alone = found(probes[2:], answer=config(4, amp="bf16"))["amp"]
    assert alone.speed_ratio == pytest.approx(4.0) and alone.disturbed


def test_an_effect_has_an_interval_as_wide_as_equal_processes_differ():
    def of(noise):
        rounds = [
            played(one, speed * (1 + noise * (-1) ** number), number)
            for number in range(6)
            for one, speed in ((BASELINE, 100), (config(4, amp="bf16"), 150 * (1 - noise * (-1) ** number) ** 2))
        ]
        return found([probed(BASELINE, 100), probed(config(4, amp="bf16"), 150), *rounds])["amp"]

    for noise in (0.01, 0.05):
        low, high = of(noise).speed_ratio_ci
        assert low < of(noise).speed_ratio < high
    narrow, wide = (of(noise).speed_ratio_ci for noise in (0.01, 0.05))
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])


def test_a_machine_that_became_slower_after_the_search_changes_no_effect():
    probes = [probed(BASELINE, 100), probed(config(8), 120), probed(ANSWER, 180)]
    rounds = [played(one, speed / 2, number) for number in range(3) for one, speed in ((BASELINE, 100), (ANSWER, 180))]
    assert found([*probes, *rounds])["amp"].speed_ratio == pytest.approx(1.5, rel=0.02)
