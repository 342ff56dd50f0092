"""When a probe is warm, when it has been timed long enough, and how sure it is."""

import math
import random
from statistics import median

import pytest

from autotune.probe.timing import (
    LATE,
    MIN_BLOCKS,
    Blocks,
    Timing,
    is_warm,
    median_interval,
    micro_steps_per_block,
    rate_interval,
)
from autotune.records.config import ProbeSettings


def test_one_step_alone_is_never_warm():
    assert not is_warm([1.0])


def test_steps_that_agree_are_warm():
    assert is_warm([3.0, 1.0, 1.0, 1.01])


def test_steps_that_still_get_faster_are_not_warm():
    assert not is_warm([4.0, 3.0, 2.0, 1.0])


def test_one_slow_step_does_not_keep_a_settled_run_cold():
    assert is_warm([1.0, 1.0, 9.0, 1.0])


@pytest.mark.parametrize(
    ("micro_s", "accumulation_steps", "by_parts", "count"),
    [
        (0.001, 4, True, 4 * 13),  # several short steps
        (0.01, 8, True, 5),
        (0.01, 4, True, 8),
        (0.1, 8, True, 1),  # a part of a long one
        (0.02, 32, True, 3),
        (0.1, 8, False, 8),
        (0.4, 1, True, 1),
    ],
)
def test_a_block_is_long_enough_for_the_clock_and_no_longer_than_it_has_to_be(
    micro_s, accumulation_steps, by_parts, count
):
    found = micro_steps_per_block(micro_s, accumulation_steps * micro_s, accumulation_steps, by_parts=by_parts)
    assert found == count


def test_the_interval_of_six_values_is_their_range():
    assert median_interval([6, 2, 4, 1, 5, 3]) == (1, 6)


def test_the_interval_of_nine_values_leaves_out_the_extremes():
    assert median_interval([1, 2, 3, 4, 5, 6, 7, 8, 9]) == (2, 8)


def test_the_interval_covers_the_true_median_at_least_95_percent_of_the_time():
    generator = random.Random(1)
    covered = 0
    for _ in range(2000):
        low, high = median_interval([generator.lognormvariate(0, 1) for _ in range(12)])
        covered += low <= 1 <= high
    assert covered / 2000 >= 0.95


def test_the_interval_contains_the_median_for_every_count():
    for count in range(1, 60):
        values = [math.sin(index) for index in range(count)]
        low, high = median_interval(values)
        assert low <= median(values) <= high


def test_the_rate_of_unequal_blocks_is_all_samples_over_all_the_time():
    rate, low, high = rate_interval([100.0, 25.0])  # 100 samples each: one second and four
    assert rate == 40.0 and low < rate < high


def test_the_rates_interval_covers_the_true_rate_about_95_percent_of_the_time():
    generator = random.Random(1)
    covered = 0
    for _ in range(2000):
        _, low, high = rate_interval([1 / generator.gauss(1, 0.2) for _ in range(6)])
        covered += low <= 1 <= high
    assert 0.93 <= covered / 2000 <= 0.97


def test_one_block_has_no_interval():
    assert rate_interval([50.0]) == (50.0, 50.0, 50.0)


def test_unequal_blocks_are_not_judged_by_their_median():
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None, interval=0.02, max_timed_s=100), unequal=True)
    for speed in (100.0, 100.0, 10.0):
        blocks.add(speed, 0.1)
    assert blocks.throughput[0] == 25.0


def test_quiet_blocks_end_at_the_fewest():
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None, interval=0.02, max_timed_s=100))
    while not blocks.enough:
        blocks.add(100.0, 0.1)
    assert len(blocks.samples_per_s) == MIN_BLOCKS


def test_noisy_blocks_end_when_the_time_is_up():
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None, interval=0.001, max_timed_s=2.0))
    generator = random.Random(1)
    while not blocks.enough:
        blocks.add(generator.uniform(50, 150), 0.2)
    assert 2.0 <= blocks.timed_s < 2.5


@pytest.mark.parametrize(("block_s", "fewest"), [(1.5, 2), (0.6, 2), (0.3, 4)])
def test_blocks_longer_than_the_time_allowed_need_only_be_two(block_s, fewest):
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None, interval=0.001, max_timed_s=0.5))
    while not blocks.enough:
        blocks.add(100.0 + len(blocks.samples_per_s), block_s)
    assert len(blocks.samples_per_s) == fewest


@pytest.mark.parametrize(
    ("speeds", "block_s", "fewest"), [((100.0, 104.0), 0.5, 2), ((78.0, 109.0), 0.5, 4), ((26.0, 58.0), 2.0, 3)]
)
def test_long_blocks_that_differ_are_timed_twice_as_long_and_are_three_at_least(speeds, block_s, fewest):
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None, interval=0.001, max_timed_s=0.5))
    while not blocks.enough:
        blocks.add(speeds[len(blocks.samples_per_s) % 2], block_s)
    assert len(blocks.samples_per_s) == fewest


def test_noise_that_no_longer_shrinks_ends_the_timing_before_the_time_is_up():
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None, interval=0.001, max_timed_s=math.inf))
    for index in range(1000):
        if blocks.enough:
            break
        blocks.add(100.0 if index % 2 else 90.0, 0.1)
    assert len(blocks.samples_per_s) < 40


def test_one_disturbed_block_does_not_move_the_throughput():
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None, interval=0.02, max_timed_s=100))
    for speed in (100, 100.5, 99.5, 12, 100, 100.2, 99.8, 100, 100.1, 100, 99.9, 100):
        blocks.add(speed, 0.1)
    assert blocks.half_width < 0.02


def test_a_devices_sustained_speed_takes_its_time_however_quiet_the_blocks():
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None, interval=0.02, max_timed_s=0.5, min_timed_s=2.0))
    while not blocks.enough:
        blocks.add(100.0, 0.05)
    assert blocks.timed_s == pytest.approx(2.0, abs=0.06)


def timing_of(**settings):
    """Of a run that holds 1000 bytes, with steps of 10 samples."""
    settings = ProbeSettings(**{"memory_limit_bytes": None, "max_timed_s": 1.0, **settings})
    return Timing(settings, 10, lambda: 1000, unequal=False)


def test_a_run_is_warm_when_its_steps_have_settled_or_the_time_for_that_is_up_and_never_before_the_third():
    timing, unsettled = timing_of(max_warmup_s=5.0), [4.0, 3.0, 2.0, 1.0]
    assert timing.is_warm(5, [1.0, 1.0, 1.0, 1.0], 4.0)
    assert not timing.is_warm(5, unsettled, 4.0) and timing.is_warm(5, unsettled, 6.0)
    assert not timing.is_warm(2, [1.0], 6.0)


@pytest.mark.parametrize(
    ("settings", "is_cut"),
    [
        ({}, False),
        ({"slowest_samples_per_s": 11.0}, True),
        ({"slowest_samples_per_s": 9.0}, False),
        ({"front": ((1000, 30.0),)}, True),
        ({"front": ((1000, 20.0),)}, False),  # no farther than processes of one config now and then are
        ({"front": ((1001, 30.0),)}, False),  # it takes more memory
        ({"slowest_samples_per_s": 11.0, "num_steps": 5}, False),
    ],
)
def test_the_warm_up_is_the_measurement_of_what_is_not_worth_timing(settings, is_cut):
    timing = timing_of(**settings)
    assert timing.cut_short([1.0, 0.5, 1.0]) == is_cut
    assert timing.blocks.samples_per_s == ([10.0, 20.0, 10.0] if is_cut else [])


def test_timing_stops_when_something_is_surely_faster_in_no_more_memory():
    timing, lighter = (timing_of(interval=1e-9, front=((peak, 110.0),)) for peak in (1000, 1001))
    for number in range(1, MIN_BLOCKS + 1):
        assert not timing.is_done(number, 0.0)
        for one in (timing, lighter):
            one.blocks.add(100.0 + number, 0.01)
    assert timing.is_done(MIN_BLOCKS, 0.0) and not lighter.is_done(MIN_BLOCKS, 0.0)


def test_what_was_timed_has_to_do_when_the_time_out_is_near():
    timing = timing_of(timeout_s=10.0)
    assert not timing.is_done(0, 11 * LATE)  # nothing was
    timing.blocks.add(100.0, 0.1)
    assert timing.is_done(1, 11 * LATE) and not timing.is_done(1, 9 * LATE)


def test_a_run_of_so_many_samples_goes_on_until_it_has_them_however_quiet_it_is_and_not_for_too_long():
    timing, slow = timing_of(num_samples=200, interval=0.5), timing_of(num_samples=200, max_timed_s=1.0)
    for number in range(10):
        assert not timing.is_done(number, 0.0)
        timing.blocks.add(100.0, 0.2, num_samples=20)
        slow.blocks.add(10.0, 0.25, num_samples=2)
    assert timing.is_done(10, 0.0)
    assert slow.is_done(10, 0.0)


def test_two_blocks_of_long_steps_are_enough_once_the_samples_are_taken():
    timing = timing_of(num_samples=48, max_timed_s=5.0)
    for number in range(2):
        assert not timing.is_done(number, 0.0)
        timing.blocks.add(40.0 + 20 * number, 0.5, num_samples=24)
    assert timing.is_done(2, 0.0)


def test_a_block_in_which_a_pass_started_is_not_one_of_the_two():
    timing = timing_of(num_samples=48, max_timed_s=5.0)
    for starts in (0, 1, 0):
        assert not timing.is_done(0, 0.0)
        timing.blocks.add(40.0, 0.5, num_samples=24, starts=starts)
    assert timing.is_done(3, 0.0)


def test_a_run_of_so_many_steps_is_done_after_them_alone():
    timing = timing_of(num_steps=5, timeout_s=10.0)
    for _ in range(2 * MIN_BLOCKS):
        timing.blocks.add(100.0, 1.0)
    assert not timing.is_done(4, 9.9) and timing.is_done(5, 0.0)


@pytest.mark.parametrize(
    ("has_new", "left"),
    [
        ("1010001", [7.0, 6.0, 5.0, 4.0]),
        ("0001", [10.0, 9.0, 8.0, 7.0]),
        ("1111", [8.0, 7.0]),
        ("1", [10.0]),
        ("", []),
    ],
    ids=["the first ones", "a later one", "every one", "one alone", "none at all"],
)
def test_the_first_blocks_are_left_out_up_to_the_last_of_half_of_them_with_a_new_shape(has_new, left):
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None))
    for number, is_new in enumerate(has_new):
        blocks.add(10.0 - number, 0.1, has_new_shapes=is_new == "1")
    blocks.leave_out_new_shapes()
    assert blocks.samples_per_s == left


@pytest.mark.parametrize(
    ("starts", "within", "left"),
    [
        ((0, 0, 0), True, [10.0, 9.0, 8.0]),
        ((0, 1, 0), True, [10.0, 8.0]),
        ((1, 1), False, [10.0, 9.0]),
        ((0, 2, 1), False, [10.0, 9.0, 8.0]),
    ],
    ids=["none", "one", "in every block", "many"],
)
def test_blocks_in_which_a_pass_starts_are_left_out_where_they_are_few(starts, within, left):
    blocks = Blocks(ProbeSettings(memory_limit_bytes=None))
    for number, count in enumerate(starts):
        blocks.add(10.0 - number, 0.1, starts=count)
    assert blocks.leave_out_starts() is within
    assert blocks.samples_per_s == left
