"""The figures of several processes of one config."""

from dataclasses import replace

import pytest

from autotune.records.outcome import Kind, Outcome
from autotune.study.figures import at_one_time, measured, unrest
from autotune.techniques import find_techniques
from tests.closed_form import measurement

complete = find_techniques().complete

ONE, TWO, OTHER = (complete({"batch_size": size}, global_batch=96) for size in (4, 8, 16))


def process(config, speed, held=0.0, peak_bytes=500):
    told = (f"others held the processor for {held:.0%} of the time",) if held else ()
    found = replace(measurement(config, speed, peak_bytes), contention=held, disturbances=told)
    return Outcome(kind=Kind.OK, measurement=found)


def figures(*speeds):
    return {
        config: measured(config, [process(config, speed)])
        for config, speed in zip((ONE, TWO, OTHER), speeds, strict=False)
    }


def test_a_disturbed_process_counts_for_the_peak_alone():
    found = measured(ONE, [process(ONE, 120), process(ONE, 59, held=0.5, peak_bytes=600), process(ONE, 122)])
    assert 120 < found.samples_per_s < 122
    assert found.peak_bytes == 600 and found.num_processes == 3


def test_where_all_were_disturbed_the_interval_says_so():
    low, high = measured(ONE, [process(ONE, 59, held=0.5)]).samples_per_s_ci
    assert low < 59 / 2 and high > 59 * 2
    low, high = measured(ONE, [process(ONE, 120)]).samples_per_s_ci
    assert (low, high) == pytest.approx((120 * 0.99, 120 * 1.01))


def test_the_more_of_its_time_others_held_the_less_a_process_says():
    found = [unrest(process(ONE, 100, held)) for held in (0.0, 0.2, 0.5, 1.0)]
    assert found[0] == 0 and found == sorted(found) and len({*found}) == 4
    throttled = replace(process(ONE, 100).measurement, disturbances=("clock throttled: heat",))
    assert 0 < unrest(Outcome(kind=Kind.OK, measurement=throttled)) < found[1]


def test_nothing_is_told_to_be_faster_than_it_was_measured():
    """The machine was slower in the search than it was in the play-off."""
    searched = figures(100, 110, 120)
    played = {config: found for config, found in figures(130, 143).items() if config != OTHER}
    assert at_one_time(searched, played)[OTHER].samples_per_s == 120
    slower = {config: found for config, found in figures(50, 55).items() if config != OTHER}
    assert at_one_time(searched, slower)[OTHER].samples_per_s == pytest.approx(60)


def test_a_figure_of_the_search_that_was_disturbed_tells_of_no_change():
    """Its config is as fast as ever; the other one has become half as fast."""
    played = {config: found for config, found in figures(100, 50).items() if config != OTHER}
    searched = figures(20, 100, 120)
    assert at_one_time(searched, played, disturbed=[ONE])[OTHER].samples_per_s == pytest.approx(60)
    assert at_one_time(searched, played, disturbed=[ONE, TWO])[OTHER].samples_per_s == 120
