"""What ranks wait for is told from what they compute, and a slow rank from noise."""

from __future__ import annotations

import pytest

from autotune.probe.waiting import NUM_COMPARED, Ranks, RankTimes


def ranks(*own_s: tuple[float, ...], exposed_s: tuple[float, ...] = (0.5, 0.1)) -> Ranks:
    """Ranks with what each computes in each step; a quarter of that forward."""
    found = Ranks.of(
        [
            [RankTimes(forward_s=s / 4, backward_s=s * 3 / 4, exposed_s=exposed) for s in seconds]
            for seconds, exposed in zip(own_s, exposed_s, strict=True)
        ]
    )
    assert found is not None
    return found


def test_phases_are_what_the_fastest_rank_computes_and_waits_for() -> None:
    found = ranks((1.0, 1.0, 1.0), (1.4, 1.4, 1.4)).phases_s(accumulation_steps=2)
    assert found == pytest.approx({"forward": 0.5, "backward": 1.5, "imbalance": 0.8, "communication": 0.1})


@pytest.mark.parametrize(
    ("own_s", "slow_rank"),
    [
        (((1.0, 1.01, 1.02, 1.0), (1.2, 1.19, 1.21, 1.2)), 1),
        (((1.2, 1.19, 1.21, 1.2), (1.0, 1.01, 1.02, 1.0)), 0),
        (((1.0, 1.0, 1.0, 1.0), (1.02, 1.02, 1.02, 1.02)), None),  # sure, and too little to matter
        (((1.0, 1.3, 1.0, 1.0), (1.2, 1.2, 1.2, 1.2)), None),  # within the noise
        (((1.0, 1.0, 1.0), (1.2, 1.2, 1.2)), None),  # too few to tell
    ],
)
def test_a_rank_is_slow_when_all_its_steps_are_and_by_so_much_that_it_matters(
    own_s: tuple[tuple[float, ...], ...], slow_rank: int | None
) -> None:
    assert NUM_COMPARED == 4
    assert ranks(*own_s).slow_rank == slow_rank


def test_nothing_is_told_where_one_rank_has_no_clock() -> None:
    assert Ranks.of([[RankTimes(forward_s=1.0, backward_s=1.0, exposed_s=0.0)], []]) is None
