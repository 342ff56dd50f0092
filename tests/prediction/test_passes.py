"""Laws in the batch size from passes at a few batch sizes."""

from __future__ import annotations

import pytest

from autotune.prediction.passes import Event, Pass, excess_at_peak, fit_end, fit_peak, fit_volume
from autotune.prediction.traces import Purpose


def made(batch_size: int, *sizes: int, frees: tuple[int, ...] = ()) -> Pass:
    """Allocates storages 2, 3, ...; those in `frees` are freed as soon as the next one is there."""
    events = []
    for key, size in enumerate(sizes, start=2):
        events.append(Event(key, size, True))
        if key - 1 in frees:
            events.append(Event(key - 1, sizes[key - 3], False))
    keys = range(1, len(sizes) + 2)
    return Pass(
        batch_size=batch_size,
        held={1: 100},
        events=tuple(events),
        purposes={key: Purpose.PARAMETERS if key == 1 else Purpose.ACTIVATIONS for key in keys},
        modules={key: f"layer{key}" for key in keys if key > 1},
    )


def a_step(batch_size: int) -> Pass:
    """A large constant for a moment, or several storages that grow with the batch."""
    return made(batch_size, 500, 10 * batch_size, 20 * batch_size, frees=(2,))


def test_two_passes_tell_the_peak_at_every_batch_size():
    law = fit_peak([a_step(2), a_step(8)])
    for batch_size in (1, 2, 5, 8, 16, 17, 1000):
        real = 100 + max(500 + 10 * batch_size, 30 * batch_size)
        assert law.at(batch_size).total_bytes(batch_size) == pytest.approx(real)
    assert len(law.pieces) == 2
    assert law.deviation == 0


def test_the_lines_say_which_modules_hold_the_activations():
    law = fit_peak([a_step(2), a_step(8)])
    assert law.at(1000).modules[0] == ("layer4", 0.0, 20.0)
    assert law.at(1).modules[0][0] == "layer2"


def test_a_storage_that_is_not_affine_shows_in_the_deviation():
    law = fit_peak([made(n, n * n) for n in (2, 4, 8)])
    assert law.deviation == pytest.approx((100 + 24) / (100 + 16) - 1)


def test_passes_that_do_other_things_at_other_batch_sizes_are_a_line_through_their_peaks():
    law = fit_peak([made(2, 50), made(8, 50, 100)])
    assert law.at(2).total_bytes(2) == 150
    assert law.at(8).total_bytes(8) == 250
    assert law.deviation > 0


def test_what_is_held_in_the_end_and_what_an_update_adds_to_it():
    assert fit_end([a_step(2), a_step(8)]).total_bytes(5) == 100 + 10 * 5 + 20 * 5
    assert excess_at_peak(a_step(1)) == (0, 0, 0, 510, 0)


def test_the_allocated_volume_is_every_storage_as_a_line_in_the_batch_size():
    assert sorted(fit_volume([a_step(2), a_step(8)])) == [(0, 10, 1), (0, 20, 1), (500, 0, 1)]
    assert fit_volume([made(2, 50, 50), made(4, 60, 60)]) == ((40, 5, 2),)


def test_of_passes_that_do_other_things_what_has_another_size_goes_with_the_batch():
    assert fit_volume([made(2, 50, 7), made(8, 80, 7, 80)]) == ((7, 0, 1), (0, 10, 2))
