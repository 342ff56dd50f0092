"""Trials as Optuna keeps them."""

from __future__ import annotations

from autotune.records.inspection import Support
from autotune.space import Space, build_space
from autotune.study.trials import distributions_of
from autotune.techniques import find_techniques
from tests.closed_form import inspection


def space_with(amp: Support, include: tuple[str, ...] = ()) -> Space:
    found = inspection(support=inspection().support | {"amp": amp})
    return build_space(found, find_techniques(), include=include)[0]


def test_distributions_do_not_change_with_what_is_left_out() -> None:
    """Optuna refuses a categorical distribution that changes within a study."""
    amp = Support(choices=("off", "bf16"), optional=("fp16",))
    assert distributions_of(space_with(amp)) == distributions_of(space_with(amp, include=("amp",)))


def test_distributions_do_not_change_with_which_choices_are_optional() -> None:
    """Which they are depends on the budget, on what compiling was seen to take, and on the rates of the device."""
    one = Support(choices=("off", "fp16"), optional=("bf16",))
    other = Support(choices=("off", "bf16"), optional=("fp16",))
    assert distributions_of(space_with(one)) == distributions_of(space_with(other))
