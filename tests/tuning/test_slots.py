"""Searches over a runner that runs several probes at once."""

from dataclasses import dataclass

import pytest

from autotune.records.config import ProbeSettings, describe_batch
from autotune.records.study import Proposal
from autotune.runners.jobs import ProbeJob
from autotune.runners.runner import ProbeFault
from autotune.space import build_space
from autotune.study.reading import load_study
from autotune.techniques import find_techniques
from autotune.tuning.explore import explore, measure_baseline
from autotune.tuning.search import answer
from tests.closed_form import ClosedFormRunner, inspection, make_search

FOUND = inspection()


@dataclass
class Wide(ClosedFormRunner):
    """Two slots; notes how many probes were in flight together."""

    num_slots: int = 2

    def __post_init__(self):
        super().__post_init__()
        self.most = 0

    def submit(self, job, slot=""):
        ticket = super().submit(job, slot)
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
    others = [config for config in runner.configs if config != search.history.space.baseline]
    assert len(others) == len(set(others))
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
        lost = [self._finished.pop(0)[1].ticket for _ in range(2 if self.loses_both else 1)]
        for ticket in lost:
            self._host.leave(ticket)
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


def test_each_trial_keeps_where_it_ran_and_which_probes_ran_beside_it(tmp_path):
    search = explored(tmp_path, Wide(), num_trials=6)
    first, *later = search.history.searched
    assert (first.outcome.slot, first.outcome.device, first.outcome.beside) == ("slot 0", "cpu", ())
    assert {trial.outcome.slot for trial in later} == {"slot 0", "slot 1"}
    assert all(set(trial.outcome.beside) <= {label_of(other) for other in later} for trial in later)
    assert any(trial.outcome.beside for trial in later)
    kept = search.store.trials()
    assert [trial.outcome for trial in kept] == [trial.outcome for trial in search.history.trials]


def label_of(trial):
    return f"probe of {describe_batch(trial.config)} on {trial.outcome.slot}"


def test_the_play_off_keeps_to_one_slot(tmp_path):
    search = make_search(tmp_path, Wide(), inspection=FOUND, num_trials=6, sampler="random")
    answer(search)
    played = [trial.outcome for trial in search.history.trials if trial.in_play_off]
    assert len(played) > 2 and {(one.slot, one.beside) for one in played} == {("slot 0", ())}
    assert {trial.outcome.slot for trial in search.history.searched} == {"slot 0", "slot 1"}


def test_a_job_gets_the_slot_that_it_asks_for_or_none():
    runner = Wide()
    job = ProbeJob(config=search_space().baseline, settings=ProbeSettings(memory_limit_bytes=None))
    runner.submit(job, "slot 1")
    with pytest.raises(RuntimeError, match="the slot slot 1 is taken"):
        runner.submit(job, "slot 1")
    runner.submit(job)
    with pytest.raises(RuntimeError, match="all 2 slots are taken"):
        runner.submit(job)
    first, second = runner.collect().result, runner.collect().result
    assert (first.slot, second.slot) == ("slot 1", "slot 0")
    assert first.beside == (f"{job.label} on slot 0",) and second.beside == (f"{job.label} on slot 1",)


def search_space():
    return build_space(FOUND, find_techniques())[0]
