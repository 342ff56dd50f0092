"""What is said of a gain: how sure it is, in the same words everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autotune.records.measured import Rival
from autotune.records.result import Ranking, Result
from autotune.report.answer import answer_sections
from autotune.report.figures import interval, said_of
from autotune.report.html import body
from autotune.report.study import comparison_sections
from autotune.report.terminal import as_text
from autotune.study.reading import Study
from autotune.techniques import find_techniques
from tests.report.sample_study import BASELINE, but


@pytest.fixture
def result(study: Study) -> Result:
    assert study.result is not None
    return study.result


def _told(result: Result) -> str:
    return " ".join(as_text(answer_sections(result, find_techniques()), 1000).split())


def test_one_round_alone_is_never_a_flat_faster(result: Result, study: Study) -> None:
    one = but(result, num_rounds=1, speedup=1.98, speedup_ci=(1.08, 3.61))
    said = "aster in the one round there was time for: 1.98x the baseline"
    assert f"F{said}'s throughput (at least 1.08x), with 0.81x its memory." in _told(one)
    assert str(one).startswith(f"f{said} (at least 1.08x), with 0.81x its memory\n")
    row = as_text(comparison_sections([replace(study, result=one)]), 200)
    assert "faster in one round" in row and "at least 1.08x" in row and "1.98x" not in row
    narrow = replace(one, speedup_ci=(1.6, 2.4))
    assert f"F{said}'s throughput (95% interval 1.60x to 2.40x)" in _told(narrow)
    slower = replace(one, verdict="slower", speedup=0.5, speedup_ci=(0.2, 0.9))
    assert "Slower in the one round there was time for: 0.50x the baseline's throughput (at most 0.90x)" in _told(
        slower
    )


@pytest.mark.parametrize("num_rounds", [2, 5, None])
def test_an_interval_wider_than_a_factor_of_two_is_told_as_a_bound(
    result: Result, study: Study, num_rounds: int | None
) -> None:
    wide = but(result, num_rounds=num_rounds, speedup=2.61, speedup_ci=(1.31, 5.31))
    for told in (_told(wide), body(answer_sections(wide, find_techniques()))):
        assert "at least 1.31x the baseline" in told and "5.31x" not in told and "2.61x the" not in told
    assert "Faster: at least 1.31x the baseline's throughput (95% sure), with 0.81x its memory." in _told(wide)
    assert str(wide).startswith("faster: at least 1.31x the baseline (95% sure), with 0.81x its memory\n")
    assert "at least 1.31x" in as_text(comparison_sections([replace(study, result=wide)]), 200)
    slower = replace(wide, verdict="slower", speedup=0.4, speedup_ci=(0.2, 0.7))
    assert "Slower: at most 0.70x the baseline's throughput" in _told(slower)


def test_a_gain_of_single_processes_is_told_without_a_bound_that_its_chance_may_contradict(result: Result) -> None:
    unsure = {"verdict": "undecided", "undecided": "no round was completed", "confirmed": False, "num_rounds": 0}
    single = but(result, **unsure, speedup=1.98, speedup_ci=(0.98, 3.9))
    assert "Probably faster: 1.98x the baseline's throughput, with" in _told(single)
    assert "at least 0.98x" not in _told(single)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((1.00004, 1.23), "just above 1x to 1.23x"),
        ((0.8, 0.9999), "0.80x to just below 1x"),
        ((0.998, 1.23), "1.00x to 1.23x"),
    ],
)
def test_an_interval_on_one_side_of_1_is_never_told_as_one_that_holds_it(ends: tuple[float, float], words: str) -> None:
    assert interval(*ends) == words


def test_an_interval_that_holds_half_the_speed_and_a_gain_makes_nothing_probable(result: Result, study: Study) -> None:
    noisy = but(result, verdict="undecided", undecided="a quiet machine would be enough", num_rounds=2)
    noisy = replace(noisy, speedup=1.16, speedup_ci=(0.003, 450.0))
    said = "ndecided whether faster or slower: 1.16x the baseline"
    assert f"U{said}'s throughput (too noisy to tell more), with 0.81x its memory." in _told(noisy)
    assert str(noisy).startswith(f"u{said} (too noisy to tell more)")
    assert "1.16x noisy" in as_text(comparison_sections([replace(study, result=noisy)]), 200)


def test_faster_without_a_baseline_that_ran_is_said_to_run_where_the_baseline_does_not(result: Result) -> None:
    alone = replace(result, baseline=None, speedup=None, speedup_ci=None)
    assert "Runs where the baseline does not, so the speed-up is unknown. The warnings say why." in _told(alone)
    assert str(alone).startswith("runs where the baseline does not\n")
    for told in (_told(alone).partition("Recommended")[0], str(alone)):
        assert "aster" not in told


def test_the_best_of_the_others_is_told_as_a_bound_where_its_wide_interval_lies_on_one_side_of_1(
    result: Result,
) -> None:
    rival = Rival(**vars(result.finalists[1]), speedup=1.03, speedup_ci=(0.72, 1.5))
    kept = but(result, config=BASELINE.as_dict(), verdict="same", speedup=1.0, speedup_ci=None, rival=rival)
    assert "1.03x its throughput, 95% interval 0.72x to 1.50x." in _told(kept)
    slow = replace(rival, speedup=0.6, speedup_ci=(0.4, 0.9))
    assert "at most 0.90x its throughput." in _told(but(kept, rival=slow))


def test_a_ranking_tells_a_wide_gain_as_a_bound(result: Result) -> None:
    ranked = Ranking(
        choice={"variant": "small"},
        study="gpt",
        config=result.config,
        samples_per_s=75.0,
        samples_per_s_ci=(74.0, 76.0),
        peak_bytes=2**30,
        speedup=2.61,
        speedup_ci=(1.31, 5.31),
        confirmed=True,
    )
    told = _told(replace(result, rankings=(ranked,)))
    assert "at least 1.31x" in told and "2.61x" not in told


def test_where_energy_was_searched_for_a_table_tells_the_gain_in_energy(result: Result, study: Study) -> None:
    energy = {"energy_ratio": 0.62, "energy_ratio_ci": (0.58, 0.66)}
    slow = {"speedup": 0.92, "speedup_ci": (0.9, 0.94)}
    thrifty = but(result, objective="energy", verdict="thriftier", **slow, **energy)
    compared = as_text(comparison_sections([replace(study, result=thrifty)]), 200)
    assert "0.62x energy (0.58x to 0.66x)" in compared and "0.92x" not in compared
    kept = but(thrifty, energy_ratio=None, energy_ratio_ci=None, verdict="same", speedup=1.0, speedup_ci=None)
    assert "1.00x energy" in as_text(comparison_sections([replace(study, result=kept)]), 200)
    ranked = Ranking(
        choice={"variant": "small"},
        study="gpt",
        config=result.config,
        samples_per_s=75.0,
        peak_bytes=2**30,
        **slow,
        **energy,
    )
    rankings = _told(but(thrifty, rankings=(ranked,))).partition("Rankings")[2]
    assert "0.62x energy (0.58x to 0.66x)" in rankings and "0.92x" not in rankings


@pytest.mark.parametrize(
    "change",
    [
        lambda one: but(one, num_rounds=1),
        lambda one: replace(one, speedup_ci=(1.3, 5.0)),
        lambda one: replace(one, verdict="undecided", undecided="its interval holds 1", speedup_ci=(0.9, 3.1)),
        lambda one: replace(one, verdict="slower", speedup=0.8, speedup_ci=(0.7, 0.9)),
    ],
)
def test_every_view_begins_with_the_same_words(result: Result, change: Callable[[Result], Result]) -> None:
    told = change(result)
    first = str(told).partition(" the baseline (")[0]
    assert f"{first[0].upper()}{first[1:]} the baseline's throughput (" in _told(told)


@pytest.mark.parametrize("ratio", [1.73, 1.1])
def test_answer_table_and_comparison_tell_a_gain_by_the_same_ends(result: Result, study: Study, ratio: float) -> None:
    found = replace(result, speedup=ratio, speedup_ci=(0.9 * ratio, 1.1 * ratio))
    ends = interval(0.9 * ratio, 1.1 * ratio)
    assert f"{ratio:.2f}x the baseline's throughput (95% interval " in _told(found) and f"{ends})" in _told(found)
    compared = as_text(comparison_sections([replace(study, result=found)]), 200)
    assert f"{ratio:.2f}x ({ends})" in compared and "±10%" not in compared


@pytest.mark.parametrize(
    ("ends", "words"),
    [((0.81, 2.2), "0.81x to 2.20x"), ((0.998, 2.6), "1.00x to 2.60x"), ((1.0004, 2.6), "just above 1x to 2.60x")],
)
def test_a_wide_interval_that_holds_1_or_begins_there_is_told_by_both_of_its_ends(
    result: Result, study: Study, ends: tuple[float, float], words: str
) -> None:
    wide = but(result, verdict="undecided", speedup=1.33, speedup_ci=ends, num_rounds=4)
    told = said_of(wide)
    assert (told.verdict, told.gain, told.sure) == ("probably faster", "1.33x", f"95% interval {words}")
    compared = as_text(comparison_sections([replace(study, result=wide)]), 200)
    assert f"1.33x ({words})" in compared and "at least" not in compared


def test_a_gain_that_only_later_runs_leave_open_is_one_of_this_search(result: Result) -> None:
    told = said_of(but(result, verdict="faster", speedup=1.07, speedup_ci=(0.98, 1.16), num_rounds=5))
    assert told.verdict == "faster in this search" and told.sure == "95% interval of later runs 0.98x to 1.16x"
    clear = said_of(but(result, verdict="faster", speedup=1.07, speedup_ci=(1.02, 1.13), num_rounds=5))
    assert clear.verdict == "faster" and clear.sure == "95% interval 1.02x to 1.13x"
