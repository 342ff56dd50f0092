"""How sure the best so far is, while a search goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.records.config import Config
from autotune.records.study import Proposal
from autotune.tuning.anytime import answer_so_far
from autotune.tuning.clearance import Clearance
from autotune.tuning.events import Event, Listener, ProbeEnded
from autotune.tuning.explore import measure_baseline
from autotune.tuning.search import find
from tests.closed_form import ClosedFormRunner, make_search


def test_before_anything_but_the_baseline_ran_there_is_no_chance(tmp_path: Path) -> None:
    search = make_search(tmp_path, ClosedFormRunner())
    assert answer_so_far(search.history, search.cost_model, None)[1] is None
    measure_baseline(search)
    assert answer_so_far(search.history, search.cost_model, None)[1] is None


def test_what_is_much_faster_is_probably_better_and_what_is_slower_probably_not(tmp_path: Path) -> None:
    search = make_search(tmp_path, ClosedFormRunner())
    measure_baseline(search)
    config = search.history.space.complete({**search.history.space.baseline.as_dict(), "amp": "bf16"})
    search.probe(Proposal(config=config))
    _, chance = answer_so_far(search.history, search.cost_model, None)
    assert chance is not None and chance > 0.9
    against = search.cost_model.chance_to_be_better(search.history, search.history.space.baseline, config)
    assert against == pytest.approx(1 - chance)


def test_after_the_rounds_of_the_play_off_a_clear_gain_is_sure(tmp_path: Path) -> None:
    told: list[float] = []

    class Chances(Listener):
        def on(self, event: Event) -> None:
            if isinstance(event, ProbeEnded) and event.chance is not None:
                told.append(event.chance)

    search = make_search(tmp_path, ClosedFormRunner(noise=0.01))
    search.listener = Chances()
    find(search, Clearance(search))
    assert told[-1] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_in_the_play_off_the_baseline_stands_where_nothing_is_likely_better(tmp_path: Path, seed: int) -> None:
    class NothingHelps(ClosedFormRunner):
        def samples_per_s(self, config: Config) -> float:
            return 100.0 if config == search.history.space.baseline else 93.0

    played: list[ProbeEnded] = []

    class Played(Listener):
        def on(self, event: Event) -> None:
            if isinstance(event, ProbeEnded) and search.play_off is not None and search.play_off.compared:
                played.append(event)

    search = make_search(tmp_path, NothingHelps(noise=0.05, seed=seed), seed=seed)
    search.listener = Played()
    find(search, Clearance(search))
    assert played
    for event in played:
        assert event.best is not None
        assert event.chance is None if event.best[0] == search.history.space.baseline else event.chance >= 0.5
    assert played[-1].best[0] == search.history.space.baseline
