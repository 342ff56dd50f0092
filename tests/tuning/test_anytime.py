"""How sure the best so far is, while a search goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.records.study import Proposal
from autotune.tuning.anytime import answer_so_far
from autotune.tuning.clearance import Clearance
from autotune.tuning.events import Event, Listener, ProbeEnded
from autotune.tuning.explore import measure_baseline
from autotune.tuning.search import find
from tests.closed_form import ClosedFormRunner, make_search


def test_before_anything_but_the_baseline_ran_there_is_no_chance(tmp_path: Path) -> None:
    search = make_search(tmp_path, ClosedFormRunner())
    assert answer_so_far(search.history, None)[1] is None
    measure_baseline(search)
    assert answer_so_far(search.history, None)[1] is None


def test_one_process_that_is_much_faster_is_probably_better_and_never_for_certain(tmp_path: Path) -> None:
    search = make_search(tmp_path, ClosedFormRunner())
    measure_baseline(search)
    config = search.history.space.complete({**search.history.space.baseline.as_dict(), "amp": "bf16"})
    search.probe(Proposal(config=config))
    _, chance = answer_so_far(search.history, None)
    assert chance is not None and 0.7 < chance < 0.999


def test_the_rounds_of_the_play_off_make_it_surer(tmp_path: Path) -> None:
    told: list[float] = []

    class Chances(Listener):
        def on(self, event: Event) -> None:
            if isinstance(event, ProbeEnded) and event.chance is not None:
                told.append(event.chance)

    search = make_search(tmp_path, ClosedFormRunner(noise=0.01))
    search.listener = Chances()
    find(search, Clearance(search))
    assert told[-1] > told[0] and told[-1] == pytest.approx(1.0, abs=0.01)
