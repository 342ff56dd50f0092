"""How studies become a prior: the more alike and the more of one mind they are, the narrower it is."""

from __future__ import annotations

import math

import pytest

from autotune.prediction.pooling import EFFECT, Learned, Said, pool
from autotune.techniques import Factor

EXPECTED = Factor(typical=1.0, spread=1.8)


def said(factor: float, likeness: float = 1.0, std: float = 0.05, shared_by: int = 1) -> Said:
    return Said(learned=Learned(mean=math.log(factor), variance=std**2), likeness=likeness, shared_by=shared_by)


def test_without_studies_it_is_what_is_expected_of_any_model() -> None:
    assert pool(EXPECTED, [], EFFECT) == EXPECTED


def test_a_study_of_the_same_model_moves_the_prior_to_its_finding_and_narrows_it() -> None:
    found = pool(EXPECTED, [said(0.6)], EFFECT)
    assert found.typical == pytest.approx(0.6, rel=0.05)
    assert found.spread < 1.25 < EXPECTED.spread


def test_an_unlike_study_leaves_the_prior_wide() -> None:
    like, unlike = pool(EXPECTED, [said(0.6)], EFFECT), pool(EXPECTED, [said(0.6, likeness=0.1)], EFFECT)
    assert like.typical < unlike.typical < EXPECTED.typical
    assert like.spread < unlike.spread < EXPECTED.spread


def test_no_number_of_studies_makes_it_narrower_than_models_differ() -> None:
    assert pool(EXPECTED, [said(0.6)] * 1000, EFFECT).spread >= math.exp(EFFECT.alike)


def test_studies_that_disagree_leave_it_wider_than_studies_of_one_mind() -> None:
    one_mind, split = [said(0.6)] * 4, [said(0.4), said(0.9)] * 2
    assert pool(EXPECTED, split, EFFECT).spread > pool(EXPECTED, one_mind, EFFECT).spread


def test_several_studies_of_one_model_count_as_one() -> None:
    once = pool(EXPECTED, [said(0.6)], EFFECT)
    assert pool(EXPECTED, [said(0.6, shared_by=5)] * 5, EFFECT).spread == pytest.approx(once.spread)


def test_the_prior_is_never_wider_than_what_is_expected_of_any_model() -> None:
    assert pool(EXPECTED, [said(0.05), said(20.0)], EFFECT).spread <= EXPECTED.spread * 1.0001
