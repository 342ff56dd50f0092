"""What a later run of a study's answer is said to have found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.records.outcome import Kind, Outcome
from autotune.records.recheck import Recheck
from autotune.records.result import Result
from autotune.report.terminal import as_text
from autotune.report.verification import Verification
from autotune.study.reading import Study
from tests.report.sample_study import ANSWER, measured


@pytest.fixture
def verified(study: Study) -> Verification:
    """A run that was as fast as the study told, with its gain seen again."""
    answer = study.answer()
    return Verification(
        study="gpt", answer=answer, outcome=measured(ANSWER), seen=seen(answer), elsewhere="", slower=0.05
    )


def seen(answer: Result) -> Recheck:
    return Recheck(
        checked_at="2030-01-01T00:00:00+00:00",
        told_speedup=1.73,
        told_speedup_ci=(1.6, 1.9),
        speedup=1.65,
        speedup_std=0.01,
        samples_per_s=72.0,
        told_samples_per_s=answer.samples_per_s,
    )


def told(verified: Verification) -> str:
    return " ".join(as_text(verified.sections(), 80).split())


def test_an_answer_that_is_as_fast_as_it_was_holds(verified: Verification) -> None:
    assert verified.holds
    said = "The answer of gpt holds: 75.5 samples/s (95% 74.3 to 76.4), expected at least 71.7 (75.5 less 5%)."
    assert said in told(verified)


def test_the_gain_that_was_seen_stands_beside_the_one_that_was_told_each_with_its_interval(
    verified: Verification,
) -> None:
    assert (
        "In turns with the baseline, at 43.6 samples/s, the answer ran at 72.0: 1.65x (95% interval 1.62x to 1.68x). The study told "
        "1.73x (95% interval 1.70x to 1.77x)."
    ) in told(verified)


def test_what_to_do_about_an_answer_that_is_slower_follows_from_why_it_may_be(verified: Verification) -> None:
    slow = replace(verified, answer=replace(verified.answer, samples_per_s=100.0))
    assert not slow.holds and "no longer holds" in told(slow) and "(100 less 5%); search again." in told(slow)
    busy = replace(slow, outcome=disturbed(slow.outcome))
    assert "was not reached while other work disturbed it" in told(busy) and "on a quiet machine." in told(busy)
    elsewhere = replace(busy, elsewhere="device T4 there and CPU here")
    assert "was not reached on another device than the study's" in told(elsewhere)
    assert "verify it there, or search here." in told(elsewhere)
    assert "was reached on another device" in told(replace(verified, elsewhere="device T4 there and CPU here"))


def disturbed(outcome: Outcome) -> Outcome:
    assert outcome.measurement is not None
    return replace(outcome, measurement=replace(outcome.measurement, disturbances=("others held the processor",)))


def test_without_a_gain_to_see_again_it_is_said(verified: Verification) -> None:
    alone = replace(verified, seen=None, answer=replace(verified.answer, baseline=None, speedup=None, speedup_ci=None))
    assert "The baseline did not run in that search, so there is no gain to see again." in told(alone)


def test_a_run_that_failed_finds_nothing_about_the_answer(verified: Verification) -> None:
    failed = replace(verified, outcome=Outcome(kind=Kind.OOM, cause="too large"), seen=None)
    assert not failed.holds and not [*failed.finding()] and told(failed) == ""
    alone = replace(failed, answer=replace(failed.answer, baseline=None, speedup=None, speedup_ci=None))
    assert not [*alone.finding()]
    assert failed.to_dict()["finding"] == [] and "recheck" not in failed.to_dict()
