"""Several searches of one task share a study: each in a process of its own, over a closed form, on a real server."""

from __future__ import annotations

from collections import Counter

from autotune.study.reading import load_study
from tests.controllers import controllers
from tests.postgres import PASSWORD, database, server

__all__ = ["database", "server"]


def test_three_searches_that_begin_at_the_same_instant_share_their_probes_and_leave_with_one_answer(
    database: str,
) -> None:
    with controllers(3, database, sampler="random", num_trials=6, waits=True) as all_three:
        for one in all_three:
            one.until("begins")
        for one in all_three:
            one.go()
        answers = [one.result() for one in all_three]
        notes = [one.notes() for one in all_three]
        said = [one.lines for one in all_three]
    read = load_study(database)
    probed = Counter(probe.config for probe in read.probes if not probe.in_play_off)
    assert max(probed.values()) == 1 and len(probed) > 6
    assert (read.num_running, read.num_lost) == (0, 0)
    assert [probe.number for probe in read.probes] == [*range(len(read.probes))]
    assert all(answer["config"] == read.answer().config for answer in answers)
    assert len({answer["samples_per_s"] for answer in answers}) == 1 and read.answer().play_off.confirmed
    assert sum(any("play-off: " in note for note in told) for told in notes) == 1
    assert PASSWORD not in str(said) and PASSWORD not in str(read.answer().to_dict())
