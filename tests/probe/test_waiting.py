"""What ranks wait for is told from what they compute, and a slow rank from noise."""

from __future__ import annotations

import pytest

from autotune.probe.waiting import NUM_COMPARED, Ranks, RankTimes


def ranks(*waits_s: tuple[float, ...]) -> Ranks:
    """Ranks with what each waits for gradients in each step, whose ends are the same."""
    found = Ranks.of(
        [
            [
                RankTimes(forward_s=0.5 - seconds / 4, backward_s=1.5 - seconds * 3 / 4, exposed_s=seconds)
                for seconds in waits
            ]
            for waits in waits_s
        ]
    )
    assert found is not None
    return found


def test_phases_are_what_the_first_rank_computes_and_waits_for() -> None:
    found = ranks((0.5, 0.5, 0.5), (0.1, 0.1, 0.1)).phases_s(accumulation_steps=2)
    assert found == pytest.approx({"forward": 0.75, "backward": 2.25, "imbalance": 0.8, "communication": 0.1})


@pytest.mark.parametrize(
    ("waits_s", "slow_rank"),
    [
        (((0.3, 0.31, 0.32, 0.3), (0.1, 0.11, 0.1, 0.1)), 1),
        (((0.1, 0.11, 0.1, 0.1), (0.3, 0.31, 0.32, 0.3)), 0),
        (((0.11, 0.11, 0.11, 0.11), (0.1, 0.1, 0.1, 0.1)), None),  # sure, and too little to matter
        (((0.3, 0.3, 0.3, 0.3), (0.1, 0.4, 0.1, 0.1)), None),  # within the noise
        (((0.3, 0.3, 0.3), (0.1, 0.1, 0.1)), None),  # too few to tell
        (((0.3,) * 10, (0.4, *(0.1,) * 9)), 1),  # one step of ten was disturbed
    ],
)
def test_a_rank_is_slow_when_it_is_always_the_last_and_by_so_much_that_it_matters(
    waits_s: tuple[tuple[float, ...], ...], slow_rank: int | None
) -> None:
    assert NUM_COMPARED == 4
    assert ranks(*waits_s).slow_rank == slow_rank


def test_nothing_is_told_where_one_rank_has_no_clock() -> None:
    assert Ranks.of([[RankTimes(forward_s=1.0, backward_s=1.0, exposed_s=0.0)], []]) is None
