"""What warm-up steps tell: not the first, not those of the largest batch, and not those that compiled."""

from __future__ import annotations

import pytest

from autotune.probe.warm_steps import WarmStep, compile_s_of, telling_steps, typical_step

COLD = WarmStep(5.0, 3.0)
LARGEST = WarmStep(0.5, 0.1, num_micro=2, is_typical=False)
COMPILED = WarmStep(2.0, 0.2, compiled=True)
USUAL = WarmStep(0.1, 0.1)
SLOWER = WarmStep(0.3, 0.1)


def test_the_typical_step_is_the_median_of_those_that_tell_the_speed() -> None:
    steps = [COLD, LARGEST, COMPILED, USUAL, SLOWER]
    assert telling_steps(steps) == [USUAL, SLOWER]
    assert (typical_step(steps).micro_s, typical_step(steps).update_s) == pytest.approx((0.2, 0.1))


def test_where_every_later_step_compiled_these_have_to_do() -> None:
    assert telling_steps([COLD, LARGEST, COMPILED]) == [COMPILED]


def test_compiling_takes_what_the_first_step_and_those_that_compiled_took_beyond_the_typical() -> None:
    beyond_s = (5.0 - 0.1) + (3.0 - 0.1) + (2.0 - 0.1) + (0.2 - 0.1)
    assert compile_s_of([COLD, LARGEST, COMPILED, USUAL]) == pytest.approx(beyond_s)
    assert compile_s_of([USUAL, LARGEST, SLOWER]) == 0.0, "no less than nothing"


def test_a_step_of_several_micro_batches_has_one_update() -> None:
    assert USUAL.whole_s(4) == pytest.approx(4 * 0.1 + 0.1)
    assert USUAL.after(0.2).whole_s(4) == pytest.approx(4 * 0.3 + 0.1)
