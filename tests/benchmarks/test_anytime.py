"""When the answer so far counts as near the final one."""

from __future__ import annotations

from tests.benchmarks.anytime import Anytime


def test_the_answer_is_near_from_the_first_probe_after_which_it_stays_within_five_percent() -> None:
    speeds = [(3.0, 0.0), (5.0, 96.0), (8.0, 90.0), (11.0, 97.0), (14.0, 100.0)]

    found = Anytime.of(speeds, ended_s=20.0, final=100.0)

    assert (found.probed_s, found.first_s, found.near_s, found.ended_s) == (3.0, 5.0, 11.0, 20.0)


def test_an_answer_that_was_never_the_best_so_far_is_near_only_when_the_search_ends() -> None:
    found = Anytime.of([(3.0, 50.0), (5.0, 60.0)], ended_s=9.0, final=100.0)

    assert (found.first_s, found.near_s) == (9.0, 9.0)


def test_a_better_answer_on_the_way_counts_as_near() -> None:
    assert Anytime.of([(3.0, 130.0), (5.0, 100.0)], ended_s=9.0, final=100.0).near_s == 3.0
