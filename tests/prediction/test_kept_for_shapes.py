"""What a training keeps for the shapes of its micro batches, by the probes of other configs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.prediction.kept_for_shapes import KeptForShapes
from autotune.records.config import Config, ShapeGrowth
from autotune.records.outcome import Kind, Outcome
from autotune.techniques import find_techniques
from tests.closed_form import MIB, measurement

TECHNIQUES = find_techniques()


def config_of(batch_size: int, **choices: object) -> Config:
    return TECHNIQUES.complete({"batch_size": batch_size, "accumulation_steps": 1, **choices})


def told(config: Config, num_shapes: float, each_mib: float, most_mib: float | None = None) -> tuple[Config, Outcome]:
    """A probe that has seen memory grow."""
    growth = ShapeGrowth(bytes_per_shape=each_mib * MIB, most_bytes=None if most_mib is None else most_mib * MIB)
    found = replace(measurement(config, 100.0, 500 * MIB), shape_growth=growth, num_shapes_expected=num_shapes)
    return config, Outcome(kind=Kind.OK, measurement=found)


def kept_mib(config: Config, *probes: tuple[Config, Outcome]) -> float | None:
    found = KeptForShapes(TECHNIQUES, probes).of(config)
    return None if found is None else found.num_bytes / MIB


def test_it_is_as_much_for_each_shape_that_training_is_expected_to_meet() -> None:
    assert kept_mib(config_of(8), told(config_of(8), 20, 3)) == pytest.approx(60)


def test_other_kernels_tell_nothing_of_it_but_how_many_shapes_there_are() -> None:
    half = config_of(8, amp="bf16")
    assert kept_mib(half) is None
    assert kept_mib(half, told(config_of(8), 20, 3)) is None
    assert kept_mib(half, told(config_of(8), 20, 3), told(config_of(64, amp="bf16"), 5, 30)) == pytest.approx(600)
    assert kept_mib(config_of(8, optimizer_impl="fused"), told(config_of(8), 20, 3)) == pytest.approx(60)


def test_the_same_kernels_in_recomputed_blocks_tell_it_until_such_a_config_was_probed() -> None:
    recomputed = config_of(8, checkpoint_segments=2)
    plain, own = told(config_of(8), 20, 3), told(recomputed, 20, 4)
    assert kept_mib(recomputed, plain) == pytest.approx(60)
    assert kept_mib(recomputed, plain, own) == pytest.approx(80)


def test_larger_micro_batches_have_fewer_shapes_and_smaller_ones_at_least_as_many() -> None:
    large, small = told(config_of(32), 20, 4), told(config_of(2), 115, 4)
    assert kept_mib(config_of(1024), large) == pytest.approx(4 * 2.5, rel=0.01)
    assert kept_mib(config_of(8), large) == pytest.approx(4 * 20)
    assert kept_mib(config_of(8), large, small) == pytest.approx(4 * 48, rel=0.01)


def test_it_ends_where_a_cache_is_full() -> None:
    assert kept_mib(config_of(32), told(config_of(32), 200, 4, most_mib=380)) == pytest.approx(380)


def test_a_size_that_was_not_probed_makes_it_unsure() -> None:
    kept = KeptForShapes(TECHNIQUES, [told(config_of(32), 20, 4)])
    probed, other = kept.of(config_of(32)), kept.of(config_of(8))
    assert probed is not None and other is not None
    assert probed.std_bytes == 0 < other.std_bytes


def test_the_nearest_size_tells_how_much_a_shape_takes_and_one_that_is_far_off_says_little() -> None:
    probes = [told(config_of(32), 20, 4), *(told(config_of(1), 120, each) for each in (1.7, 1.6, 9.0))]
    assert kept_mib(config_of(1), *probes) == pytest.approx(1.7 * 120)


def test_where_nothing_was_seen_to_grow_nothing_is_told() -> None:
    assert kept_mib(config_of(8), told(config_of(8), 20, 0)) is None
    assert kept_mib(config_of(8), told(config_of(8), 20, 0), told(config_of(8, amp="bf16"), 20, 30)) is None


def test_recomputed_blocks_tell_nothing_of_a_config_without_them_that_was_probed() -> None:
    probes = [told(config_of(32), 20, 4), *(told(config_of(8, checkpoint_segments=2), 20, each) for each in (0, 0, 10))]
    kept = KeptForShapes(TECHNIQUES, probes)
    found, own = kept.of(config_of(8)), kept.of(config_of(32))
    assert found is not None and own is not None
    assert found.num_bytes == 80 * MIB and found.std_bytes > 0
    assert own.num_bytes == 80 * MIB and own.std_bytes == 0


def test_an_end_that_another_micro_batch_told_holds_only_where_none_was_probed() -> None:
    probes = [told(config_of(8), 200, 4), told(config_of(64), 20, 4, most_mib=380)]
    assert kept_mib(config_of(8), *probes) == pytest.approx(800)
    assert kept_mib(config_of(4), *probes) == pytest.approx(380)


def test_a_measured_peak_lacks_what_its_process_has_not_met() -> None:
    kept = KeptForShapes(TECHNIQUES, [told(config_of(8), 20, 3)])

    def missing_mib(config: Config, **changes: object) -> float:
        return kept.missing_bytes(config, replace(measurement(config, 100.0, 500 * MIB), **changes)) / MIB

    cut_short = config_of(8, checkpoint_segments=2)
    assert missing_mib(cut_short, num_shapes=4) == pytest.approx(60 - 12)
    assert missing_mib(cut_short, num_shapes=30) == 0
    assert missing_mib(cut_short, num_shapes=4, long_run_growth_bytes=40 * MIB) == pytest.approx(8)
    growth = ShapeGrowth(bytes_per_shape=3.0 * MIB)
    assert missing_mib(config_of(8), shape_growth=growth, num_shapes_expected=15.0) == pytest.approx(15)
    assert missing_mib(config_of(8), shape_growth=growth, num_shapes_expected=40.0) == pytest.approx(-60)
    assert missing_mib(config_of(8, amp="bf16"), num_shapes=4) == 0
