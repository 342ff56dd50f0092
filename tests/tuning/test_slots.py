"""Searches over a runner that runs several probes at once."""

import pytest

from autotune.records.trial import Proposal
from autotune.runners.runner import ProbeFault
from autotune.study.reading import load_study
from autotune.tuning.explore import explore, measure_baseline
from autotune.tuning.search import answer
from tests.closed_form import ClosedFormRunner, inspection, make_search

FOUND = inspection()


class Wide(ClosedFormRunner):
    """Two slots; notes how many probes were in flight together."""

    num_slots = 2

    def __post_init__(self):
        super().__post_init__()
        self.most = 0

    def submit(self, job):
        ticket = super().submit(job)
        self.most = max(self.most, len(self._finished))
        return ticket


def explored(folder, runner, **changes):
    search = make_search(folder, runner, **{"sampler": "cost-model", **changes})
    measure_baseline(search)
    explore(search, search.proposer())
    return search


def test_both_slots_are_used_and_nothing_is_probed_twice(tmp_path):
    search = explored(tmp_path, runner := Wide(noise=0.02))
    assert runner.most == 2 and not search.history.running
    assert len(runner.configs) == len(set(runner.configs))
    best = max(map(runner.samples_per_s, runner.configs))
    assert best >= 0.97 * runner.best_samples_per_s(search.history.space, search.history.objective.usable_bytes)


@pytest.mark.parametrize("sampler", ["cost-model", "random"])
def test_the_number_of_trials_counts_what_is_in_flight(tmp_path, sampler):
    explored(tmp_path, runner := Wide(), num_trials=5, sampler=sampler)
    assert len(runner.configs) == 5


def test_the_answer_splits_the_time_into_parts_that_add_up(tmp_path):
    search = make_search(tmp_path, Wide(), inspection=FOUND, num_trials=6, sampler="random")
    result = answer(search)
    assert sum(result.split_s.values()) == pytest.approx(result.wall_s, abs=0.1)


class Losing(Wide):
    """The machinery fails while two probes run, and loses the first or both."""

    loses_both = False
    failed = False

    def collect(self, timeout_s=None):
        if self.failed or len(self._finished) < 2:
            return super().collect(timeout_s)
        self.failed = True
        lost = [self._finished.pop(0).ticket for _ in range(2 if self.loses_both else 1)]
        raise ProbeFault("a machine has gone", tuple(lost))


@pytest.mark.parametrize("loses_both", [False, True])
def test_a_fault_loses_the_probes_that_it_names_and_no_others(tmp_path, loses_both):
    runner = Losing()
    runner.loses_both = loses_both
    search = explored(tmp_path, runner, num_trials=8)
    assert search.num_faults == 1 and len(search.history.searched) == 8
    study = load_study(tmp_path / "closed.db")
    assert study.num_running == 0 and study.num_lost == 1 + loses_both


def test_what_is_raised_while_a_probe_runs_leaves_no_trial_open(tmp_path):
    class Interrupting:
        def propose(self, history):
            if history.running:
                raise KeyboardInterrupt
            return Proposal(config=history.space.complete({"amp": "bf16"}))

    search = make_search(tmp_path, Wide())
    measure_baseline(search)
    with pytest.raises(KeyboardInterrupt):
        explore(search, Interrupting())
    assert load_study(tmp_path / "closed.db").num_running == 0 and not search.history.running
