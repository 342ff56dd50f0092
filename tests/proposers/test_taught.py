"""When the first probe, which a like study chose, counts for the probes after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autotune.proposers.taught import OnOwnJudgement, StartWhereOthersEnded
from autotune.records.config import Config
from autotune.records.study import Proposal
from autotune.tuning.explore import measure_baseline
from tests.closed_form import ClosedFormRunner, make_search


def config(batch_size: int) -> Config:
    return Config((("batch_size", batch_size),))


LENT, OWN, INADMISSIBLE, LEANER = config(64), config(32), config(24), config(8)


class Seen:
    """A history of as many other trials, that knows what was lent, or not."""

    def __init__(self, num_others: int = 1, lent_after: int | None = 0) -> None:
        self.trials, self.lent_after = [None] * num_others, lent_after

    def admissible(self) -> Callable[[Config], bool]:
        return lambda config: config != INADMISSIBLE

    def without(self, lent: Config) -> Seen:
        assert lent == LENT
        return Seen(len(self.trials), None)

    def as_if_probed_after(self, num_trials: int, lent: Config) -> Seen:
        assert lent == LENT
        return Seen(len(self.trials), num_trials)


class Model:
    """A cost model that knows what was lent."""

    def lent(self, history: Seen) -> tuple[Config, None]:
        return LENT, None


class Inner:
    """A proposer that proposes a leaner config where it knows what was lent."""

    def __init__(self, untaught: Config | None) -> None:
        self.untaught = untaught
        self.asked: list[Seen] = []

    def propose(self, history: Seen) -> Proposal | None:
        self.asked.append(history)
        chosen = LEANER if history.lent_after is not None else self.untaught
        return None if chosen is None else Proposal(config=chosen)


def judging(inner: Inner) -> Any:
    return OnOwnJudgement(inner, Model())  # type: ignore[arg-type]


def proposed(untaught: Config | None) -> Config | None:
    found = judging(Inner(untaught)).propose(Seen())
    return None if found is None else found.config


def test_a_search_goes_on_as_if_nothing_had_been_lent() -> None:
    assert proposed(OWN) == OWN
    assert proposed(None) is None


def test_what_was_lent_counts_from_where_it_would_have_been_probed() -> None:
    inner = Inner(LENT)
    judge = judging(inner)
    assert judge.propose(Seen(3)).config == LEANER
    inner.untaught = OWN  # which is not asked any more
    assert judge.propose(Seen(5)).config == LEANER
    assert [history.lent_after for history in inner.asked] == [None, 3, 3]


def test_what_it_shows_to_be_larger_than_what_does_not_fit_is_not_probed() -> None:
    assert proposed(INADMISSIBLE) == LEANER


def test_what_another_search_of_the_study_runs_is_not_tried_at_a_smaller_batch(tmp_path: Path) -> None:
    search = make_search(tmp_path, ClosedFormRunner())
    measure_baseline(search)
    lent = search.history.space.complete({"amp": "bf16", "batch_size": 8})
    cost_model: Any = SimpleNamespace(
        taught=SimpleNamespace(first=SimpleNamespace(study="some", choices={"amp": "bf16", "batch_size": 8})),
        likely_to_fit_as_taught=lambda history, configs: configs,
    )
    proposal = StartWhereOthersEnded(cost_model).propose(search.history)
    assert proposal is not None and proposal.config == lent
    search.history.catch_up(search.history.trials, frozenset({lent}))
    assert StartWhereOthersEnded(cost_model).propose(search.history) is None


class Larger(ClosedFormRunner):
    def peak_bytes(self, config: Config) -> int:
        return super().peak_bytes(config) + 40 * 2**20


def test_what_ran_as_told_and_just_misses_the_limit_is_tried_once_at_a_smaller_batch(tmp_path: Path) -> None:
    search = make_search(tmp_path, Larger())
    measure_baseline(search)
    told = {"amp": "bf16", "checkpoint_segments": 2, "batch_size": 24}  # it needs 969 MiB, and 950 are usable

    def smaller_than_told(history: Any, config: Config) -> bool:
        return config.batch_size < 24

    cost_model: Any = SimpleNamespace(
        taught=SimpleNamespace(first=SimpleNamespace(study="some", choices=told)),
        is_likely_to_fit=smaller_than_told,
        is_borne_out=lambda history: True,
    )
    proposer = StartWhereOthersEnded(cost_model)
    search.probe(Proposal(config=search.history.space.complete(told)))
    proposal = proposer.propose(search.history)
    assert proposal is not None and proposal.config == search.history.space.complete({**told, "batch_size": 16})
    search.probe(proposal)
    assert proposer.propose(search.history) is None
    assert len(search.history.feasible) == 2
