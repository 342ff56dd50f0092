"""The search search: what is probed, in what order, and what never is."""

from dataclasses import replace

import pytest
from numpy.linalg import LinAlgError

from autotune.errors import OwnFault, TaskError
from autotune.proposers.acquisition import Acquisition
from autotune.proposers.design import starting_configs
from autotune.proposers.one_at_a_time import one_change_back
from autotune.records.config import Config
from autotune.records.inspection import BatchSupport
from autotune.records.outcome import Kind, Outcome
from autotune.records.study import Proposal
from autotune.runners.runner import ProbeFault
from autotune.study.reading import load_study
from autotune.techniques import find_techniques
from autotune.tuning.confirm import confirm, finalists_of
from autotune.tuning.explore import explore, measure_baseline, tell_of_large_batches
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection, make_search
from tests.notes import Notes
from tests.rough_world import NoisyPeaks


def timeout_s(search):
    return search.budget.paced(search.settings, search.history).timeout_s


def finish(search):
    measure_baseline(search)
    explore(search, search.proposer())
    return confirm(search)


def test_the_baseline_is_probed_first(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, num_trials=3)
    finish(search)
    assert runner.configs[0] == search.history.space.baseline


def test_no_config_is_probed_twice_outside_the_play_off(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, num_trials=20)
    measure_baseline(search)
    explore(search, search.proposer())
    assert len(runner.configs) == len(set(runner.configs)) > 10


def test_nothing_larger_than_what_ran_out_of_memory_is_probed(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, num_trials=40, sampler="random")
    measure_baseline(search)
    explore(search, search.proposer())
    too_large: dict[Config, int] = {}
    for config in runner.configs:
        group = config.replace(batch_size=1, accumulation_steps=1)
        assert config.batch_size < too_large.get(group, 10**9)
        if runner.peak_bytes(config) > 0.95 * LIMIT_BYTES:
            too_large[group] = min(config.batch_size, too_large.get(group, 10**9))
    assert too_large


def test_a_change_is_not_undone_where_that_is_predicted_not_to_fit(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, sampler="cost-model", peaks=NoisyPeaks(runner))
    measure_baseline(search)
    best = search.history.space.complete({"amp": "bf16", "optimizer_impl": "fused", "batch_size": 16})
    search.probe(Proposal(config=best))
    before = len(runner.configs)
    explore(search, search.undo_changes())
    undone = [*one_change_back(best, search.history.space).values()]
    too_large = [config for config in undone if runner.peak_bytes(config) > LIMIT_BYTES]
    assert search.history.best[0] == best and too_large
    assert set(runner.configs[before:]) == set(undone) - set(too_large)


def test_every_config_keeps_the_global_batch(tmp_path):
    runner = ClosedFormRunner()
    finish(make_search(tmp_path, runner, num_trials=30, sampler="random"))
    assert {config.samples_per_step for config in runner.configs} == {96}


@pytest.mark.parametrize("sampler", ["gp", "tpe"])
def test_the_answer_is_within_three_percent_of_the_optimum_in_thirty_probes(tmp_path, sampler):
    runner = ClosedFormRunner(noise=0.005)
    search = make_search(tmp_path, runner, num_trials=30, sampler=sampler)
    standing = finish(search)
    optimum = runner.best_samples_per_s(search.history.space, search.history.objective.usable_bytes)
    assert runner.samples_per_s(standing.answer.config) >= 0.97 * optimum


def test_a_grid_covers_the_whole_space(tmp_path):
    fix = {"checkpoint_segments": 0, "optimizer_impl": "default", "amp": "off"}
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, sampler="grid", fix=fix)
    measure_baseline(search)
    explore(search, search.proposer())
    smallest_failure = min(c.batch_size for c in runner.configs if runner.peak_bytes(c) > 0.95 * LIMIT_BYTES)
    assert {c.batch_size for c in runner.configs} >= {
        c.batch_size for c in search.history.space if c.batch_size < smallest_failure
    }


def test_the_budget_ends_the_search(tmp_path):
    runner = ClosedFormRunner(seconds=0.05)
    search = make_search(tmp_path, runner, budget_s=2.0, sampler="random")
    finish(search)
    assert search.budget.elapsed_s < 4


def test_the_number_of_trials_ends_the_search(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, num_trials=5)
    measure_baseline(search)
    explore(search, search.proposer())
    assert len(runner.configs) == 5


def test_a_resumed_search_measures_nothing_again(tmp_path):
    first = ClosedFormRunner()
    search = make_search(tmp_path, first, num_trials=8)
    measure_baseline(search)
    explore(search, search.proposer())
    second = ClosedFormRunner()
    resumed = make_search(tmp_path, second, num_trials=8)
    assert len(resumed.history.searched) == 8
    measure_baseline(resumed)
    explore(resumed, resumed.proposer())
    assert not set(first.configs) & set(second.configs)


def test_trials_left_running_by_a_dead_search_are_closed(tmp_path):
    search = make_search(tmp_path, ClosedFormRunner())
    search.store.begin(Proposal(config=search.history.space.baseline, stage="baseline"), None, search.history.space)
    resumed = make_search(tmp_path, ClosedFormRunner())
    measure_baseline(resumed)
    import optuna

    states = [
        trial.state.name for trial in optuna.load_study(study_name="closed", storage=search.store.place.storage).trials
    ]
    assert states == ["FAIL", "COMPLETE"]


def test_an_unstated_baseline_is_halved_until_it_fits(tmp_path):
    found = inspection(
        baseline=find_techniques().complete({"batch_size": 96}, global_batch=96).as_dict(), baseline_given=False
    )
    search = make_search(tmp_path, ClosedFormRunner(), inspection=found)
    measure_baseline(search)
    assert search.history.space.baseline.batch_size == 12
    assert search.history.baseline is not None and search.history.baseline.ok


def test_each_halving_of_the_baseline_is_one_of_the_trials_and_another_search_goes_on_with_it(tmp_path):
    whole = find_techniques().complete({"batch_size": 96}, global_batch=96).as_dict()
    found = inspection(baseline=whole, baseline_given=False)
    for batches in ([96], [12]):
        made = make_search(tmp_path, runner := ClosedFormRunner(), inspection=found, num_trials=1)
        measure_baseline(made)
        explore(made, made.proposer())
        assert [config.batch_size for config in runner.configs] == batches


def test_batches_whose_steps_would_take_too_much_of_the_budget_are_left_out_and_told(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, listener=(notes := Notes()), sampler="cost-model", num_trials=6)
    search.history.longest_step_s = 0.2
    measure_baseline(search)
    tell_of_large_batches(search)
    explore(search, search.proposer())
    assert len(runner.configs) > 3 and max(config.batch_size for config in runner.configs) <= 0.2 * 150
    assert [
        text
        for text in notes.texts
        if "batches above 8 are tried only if a faster config is found" in text and "--budget" in text
    ]


def test_a_baseline_of_which_there_is_one_size_alone_is_not_halved(tmp_path):
    """A task's own step takes the whole global batch at once."""
    whole = find_techniques().complete({"batch_size": 96}, global_batch=96)
    found = inspection(baseline=whole.as_dict(), baseline_given=False, batch=BatchSupport(sizes=(96,)))
    measure_baseline(search := make_search(tmp_path, runner := ClosedFormRunner(), inspection=found))
    assert runner.configs == [whole] == [search.history.space.baseline]


def test_a_stated_baseline_that_does_not_fit_is_kept_as_such_and_the_search_finds_what_does(tmp_path):
    found = inspection(baseline=find_techniques().complete({"batch_size": 96}, global_batch=96).as_dict())
    search = make_search(tmp_path, ClosedFormRunner(), inspection=found, num_trials=10)
    standing = finish(search)
    assert search.history.baseline is not None and search.history.baseline.kind is Kind.OOM
    assert standing.answer is not None and standing.gain is None


def test_infeasible_trials_are_complete_with_a_positive_constraint(tmp_path):
    import optuna

    search = make_search(tmp_path, ClosedFormRunner(), num_trials=30, sampler="random")
    measure_baseline(search)
    explore(search, search.proposer())
    trials = optuna.load_study(study_name="closed", storage=search.store.place.storage).trials
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    for trial in trials:
        assert set(trial.constraints) == {"infeasibility"}
        assert (trial.constraints["infeasibility"] <= 0) == trial.user_attrs["feasible"]
    assert not all(trial.user_attrs["feasible"] for trial in trials)


def test_the_best_is_compared_with_each_of_its_changes_undone(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, num_trials=25)
    measure_baseline(search)
    explore(search, search.proposer())
    best = search.history.best[0]
    for name in best.differences(search.history.space.baseline):
        if name != "accumulation_steps":
            undone = search.history.space.complete({**best.as_dict(), name: search.history.space.baseline[name]})
            assert undone in runner.configs or runner.peak_bytes(undone) > 0.95 * LIMIT_BYTES


def test_an_interrupt_ends_the_search_after_the_running_probe(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, interrupted=lambda: len(runner.configs) >= 3)
    measure_baseline(search)
    explore(search, search.proposer())
    assert len(runner.configs) == 3


def test_a_fault_of_the_machinery_is_no_outcome_and_three_end_the_search(tmp_path):
    class Broken(ClosedFormRunner):
        def outcome_of(self, config, settings) -> Outcome:
            if len(self.configs) >= 2:
                raise ProbeFault("the fork server died")
            return super().outcome_of(config, settings)

    search = make_search(tmp_path, Broken(), sampler="random")
    measure_baseline(search)
    with pytest.raises(ProbeFault):
        explore(search, search.proposer())
    assert len(search.history.searched) == 2


@pytest.mark.parametrize("given", [True, False])
def test_a_baseline_is_probed_again_after_a_fault_of_the_machinery(tmp_path, given):
    class Flaky(ClosedFormRunner):
        def outcome_of(self, config, settings) -> Outcome:
            outcome = super().outcome_of(config, settings)
            if len(self.configs) < 3:
                raise ProbeFault("the fork server died")
            return outcome

    search = make_search(tmp_path, runner := Flaky())
    measure_baseline(search)
    assert runner.configs == [search.history.space.baseline] * 3
    assert search.history.baseline is not None and search.history.baseline.ok
    assert search.budget.paced(search.settings, search.history).slowest_samples_per_s > 0


def test_three_faults_of_the_baseline_end_the_search(tmp_path):
    class Broken(ClosedFormRunner):
        def outcome_of(self, config, settings) -> Outcome:
            super().outcome_of(config, settings)
            raise ProbeFault("the fork server died")

    with pytest.raises(ProbeFault):
        measure_baseline(make_search(tmp_path, runner := Broken()))
    assert len(runner.configs) == 3


def test_the_same_seed_gives_the_same_search(tmp_path):
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runner = ClosedFormRunner()
        search = make_search(tmp_path / name, runner, num_trials=15, seed=3)
        measure_baseline(search)
        explore(search, search.proposer())
        runs.append(runner.configs)
    assert runs[0] == runs[1]


def test_a_fixed_technique_is_in_every_config_but_the_baseline(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, num_trials=12, fix={"amp": "bf16"})
    finish(search)
    assert {c["amp"] for c in runner.configs if c != search.history.space.baseline} == {"bf16"}
    assert search.history.best[0]["amp"] == "bf16"


def test_an_unstated_baseline_is_halved_until_it_leaves_the_headroom(tmp_path):
    class Tight(ClosedFormRunner):
        def peak_bytes(self, config):
            return int(0.97 * LIMIT_BYTES) if config.batch_size == 12 else super().peak_bytes(config)

    found = inspection(
        baseline=find_techniques().complete({"batch_size": 12}, global_batch=96).as_dict(), baseline_given=False
    )
    search = make_search(tmp_path, Tight(), inspection=found)
    measure_baseline(search)
    assert search.history.space.baseline.batch_size == 6


def test_a_baseline_that_timed_out_is_tried_again_with_more_patience(tmp_path):
    class Slow(ClosedFormRunner):
        def outcome_of(self, config, settings):
            self.configs.append(config)
            return Outcome(kind=Kind.TIMEOUT, cause="killed", wall_s=settings.timeout_s)

    measure_baseline(make_search(tmp_path, Slow(), budget_s=50.0))
    patient = ClosedFormRunner()
    search = make_search(tmp_path, patient, budget_s=500.0)
    measure_baseline(search)
    assert search.history.baseline is not None and search.history.baseline.ok


class Failing(ClosedFormRunner):
    """Some configs end otherwise than by running."""

    def __init__(self, fails, kind=Kind.CRASHED, wall_s=0.1):
        super().__init__()
        self.fails, self.kind, self.wall_s = fails, kind, wall_s

    def outcome_of(self, config, settings):
        outcome = super().outcome_of(config, settings)
        return Outcome(kind=self.kind, cause="it did", wall_s=self.wall_s) if self.fails(config) else outcome


def uses_bf16(config):
    return config["amp"] == "bf16"


@pytest.mark.parametrize("sampler", ["random", "cost-model"])
def test_what_crashed_may_be_probed_again_when_the_search_is_resumed(tmp_path, sampler):
    first = Failing(uses_bf16)
    finish(make_search(tmp_path, first, num_trials=12, sampler=sampler))
    crashed = {config for config in first.configs if uses_bf16(config)}
    healthy = ClosedFormRunner()
    search = make_search(tmp_path, healthy, num_trials=12, sampler=sampler)
    standing = finish(search)
    assert crashed & set(healthy.configs)
    assert standing.answer.config["amp"] == "bf16"
    study = load_study(tmp_path / "closed.db")
    assert any(probe.outcome.kind is Kind.CRASHED for probe in study.probes)  # history stays
    assert standing.answer.config.as_dict() in [measured.config for measured in study.measured_configs()]


def test_what_crashed_twice_is_not_tried_a_third_time(tmp_path):
    fix = {"checkpoint_segments": 0, "optimizer_impl": "default"}
    crashes = []
    for _ in range(3):
        runner = Failing(uses_bf16)
        search = make_search(tmp_path, runner, sampler="grid", fix=fix)
        measure_baseline(search)
        explore(search, search.proposer())
        crashes.append({config for config in runner.configs if uses_bf16(config)})
    assert crashes[0] and crashes[1] == crashes[0] and not crashes[2]


def test_within_one_search_what_crashed_is_not_tried_again(tmp_path):
    runner = Failing(uses_bf16)
    search = make_search(tmp_path, runner, sampler="grid", fix={"checkpoint_segments": 0, "optimizer_impl": "default"})
    measure_baseline(search)
    explore(search, search.proposer())
    assert len(runner.configs) == len(set(runner.configs))


def test_a_time_out_is_tried_again_with_more_patience_only(tmp_path):
    fix = {"checkpoint_segments": 0, "optimizer_impl": "default"}
    tried = []
    for timeout_s in (20.0, 20.0, 60.0, 60.0):
        runner = Failing(uses_bf16, Kind.TIMEOUT, wall_s=timeout_s)
        search = make_search(tmp_path, runner, sampler="grid", fix=fix, timeout_s=timeout_s)
        measure_baseline(search)
        explore(search, search.proposer())
        tried.append(sum(map(uses_bf16, runner.configs)))
    assert tried[0] == tried[2] > 0 and tried[1] == tried[3] == 0


def test_a_time_out_is_held_against_the_patience_that_the_baseline_asks_for(tmp_path):
    """The time-out before the baseline is measured is a longer one."""
    fix = {"checkpoint_segments": 0, "optimizer_impl": "default"}
    tried = []
    for _ in range(2):
        runner = Failing(uses_bf16, Kind.TIMEOUT, wall_s=20.0)
        search = make_search(tmp_path, runner, sampler="grid", fix=fix, budget_s=300.0)
        measure_baseline(search)
        explore(search, search.proposer())
        tried.append(sum(map(uses_bf16, runner.configs)))
    assert tried[0] > 0 and tried[1] == 0


@pytest.mark.parametrize("kind", [Kind.CRASHED, Kind.ERROR, Kind.NONFINITE, Kind.TIMEOUT])
def test_a_baseline_that_failed_is_probed_again_when_the_search_is_resumed(tmp_path, kind):
    for _ in range(2):
        measure_baseline(make_search(tmp_path, Failing(lambda config: True, kind, wall_s=60.0)))
    search = make_search(tmp_path, ClosedFormRunner())
    measure_baseline(search)
    assert search.history.baseline is not None and search.history.baseline.ok


def test_a_baseline_that_ran_out_of_memory_is_not(tmp_path):
    measure_baseline(make_search(tmp_path, Failing(lambda config: True, Kind.OOM)))
    search = make_search(tmp_path, runner := ClosedFormRunner())
    measure_baseline(search)
    assert not runner.configs and search.history.baseline.kind is Kind.OOM


def test_with_the_objective_memory_what_is_known_is_held_against_a_baseline_that_is_measured_late(tmp_path):
    baseline = make_search(tmp_path, ClosedFormRunner()).history.space.baseline
    first = make_search(tmp_path, Failing(lambda config: config == baseline), objective="memory", num_trials=8)
    measure_baseline(first)
    explore(first, first.proposer())
    search = make_search(tmp_path, ClosedFormRunner(), objective="memory")
    measure_baseline(search)
    assert search.history.best is not None and search.history.objective.feasible(search.history.best[1])


def test_a_trial_that_was_measured_but_not_told_is_kept(tmp_path, monkeypatch):
    """A search may be killed between the two."""
    search = make_search(tmp_path, runner := ClosedFormRunner())
    baseline = search.history.space.baseline
    number = search.store.begin(Proposal(config=baseline, stage="baseline"), None, search.history.space)
    outcome = runner.probe(baseline, search.settings)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(search.store._storage, "set_trial_state_values", killed)
        with pytest.raises(KeyboardInterrupt):
            search.store.finish(number, outcome, search.history.objective, disturbed=False)
    resumed = make_search(tmp_path, ClosedFormRunner())
    assert [trial.config for trial in resumed.history.searched] == [baseline]


def test_a_probe_never_gets_more_time_than_the_budget_and_one_time_out(tmp_path):
    class Watching(ClosedFormRunner):
        timeouts: list[float]

        def outcome_of(self, config, settings):
            self.timeouts = [*getattr(self, "timeouts", []), settings.timeout_s]
            return super().outcome_of(config, settings)

    runner = Watching()
    search = make_search(tmp_path, runner, budget_s=100.0, num_trials=2)
    runner.waited_s += 130
    measure_baseline(search)
    assert max(runner.timeouts) <= 30


def test_what_was_dropped_as_inexact_is_no_longer_the_best(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, num_trials=15)
    measure_baseline(search)
    explore(search, search.proposer())
    assert search.history.best[0]["amp"] == "bf16"
    search.history.space = search.history.space.without("amp", {"bf16"})
    assert search.history.best[0]["amp"] != "bf16"
    assert not any(config["amp"] == "bf16" for config in finalists_of(search))


def test_with_the_objective_memory_smaller_batches_and_checkpointing_come_first(tmp_path):
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, objective="memory", num_trials=10)
    standing = finish(search)
    assert runner.peak_bytes(standing.answer.config) < runner.peak_bytes(search.history.space.baseline)
    assert runner.samples_per_s(standing.answer.config) >= 0.97 * runner.samples_per_s(search.history.space.baseline)


def test_the_sum_of_what_usually_helps_is_taken_apart(tmp_path):
    """Before the sampler: one of the parts may hurt here."""
    runner = ClosedFormRunner()
    search = make_search(tmp_path, runner, num_trials=14)
    measure_baseline(search)
    explore(search, search.proposer())
    sum_of_all = search.history.space.complete({"amp": "bf16", "optimizer_impl": "fused"})
    assert sum_of_all in runner.configs
    reasons = {probe.stage for probe in search.history.searched}
    assert "ablation" in reasons


def test_every_probe_but_the_play_offs_keeps_what_was_predicted_of_it(tmp_path):
    search = make_search(tmp_path, ClosedFormRunner(noise=0.01), sampler="cost-model")
    finish(search)
    probes = load_study(tmp_path / "closed.db").probes
    assert {probe.stage for probe in probes if probe.prediction is None} == {"play-off"}
    assert all(probe.stage != "play-off" for probe in probes if probe.prediction)
    later = [probe.prediction for probe in probes if probe.stage == "search" and probe.prediction]
    assert len(later) > 2
    assert all(f.samples_per_s and f.peak_bytes and f.chance_to_win and f.reason for f in later)


def test_the_cost_model_ends_the_search_when_nothing_is_likely_to_win(tmp_path):
    runner = ClosedFormRunner(noise=0.005)
    search = make_search(tmp_path, runner, sampler="cost-model")
    measure_baseline(search)
    explore(search, search.proposer())
    best = max(map(runner.samples_per_s, runner.configs))
    assert len(runner.configs) < 25
    assert best >= 0.97 * runner.best_samples_per_s(search.history.space, search.history.objective.usable_bytes)


def test_a_config_that_only_just_fitted_is_confirmed_after_those_that_surely_fit(tmp_path):
    search = make_search(tmp_path, ClosedFormRunner(noise=0.005), sampler="cost-model")
    measure_baseline(search)
    explore(search, search.proposer())
    finalists = finalists_of(search)
    tight = [
        ClosedFormRunner().peak_bytes(config) > 0.97 * search.history.objective.usable_bytes for config in finalists
    ]
    assert len(finalists) > 1 and tight == sorted(tight)


class TakingTime(Failing):
    """Each probe takes its seconds; those after the last one take as long as that."""

    def __init__(self, fails, *seconds):
        super().__init__(fails, Kind.NONFINITE)
        self.each_s = seconds

    def outcome_of(self, config, settings):
        took_s = self.each_s[min(len(self.configs), len(self.each_s) - 1)]
        self.waited_s += took_s
        found = super().outcome_of(config, settings)
        return replace(found, wall_s=took_s, cause=found.cause and "so " * len(self.configs) + "different")


@pytest.mark.parametrize("anything_fits", [True, False])
def test_while_nothing_fits_no_time_is_left_for_a_play_off(tmp_path, anything_fits):
    runner = TakingTime(lambda config: not anything_fits, 10.0)
    search = make_search(tmp_path, runner, budget_s=200.0, sampler="random")
    measure_baseline(search)
    explore(search, search.proposer())
    assert len(runner.configs) == (11 if anything_fits else 19)


def test_while_nothing_fits_the_search_goes_on_as_long_as_the_shortest_of_its_probes_would_still_end_in_time(tmp_path):
    runner = TakingTime(lambda config: True, 5.0, 15.0)
    search = make_search(tmp_path, runner, budget_s=45.0, sampler="random")
    measure_baseline(search)
    explore(search, search.proposer())
    assert len(runner.configs) == 4  # the last one began after 35 s


def test_without_a_baseline_that_runs_what_does_run_says_how_long_a_probe_may_take(tmp_path):
    runner = Failing(lambda config: config.batch_size == 4, Kind.OOM)  # the baseline's
    search = make_search(tmp_path, runner, num_trials=4, budget_s=300.0)
    measure_baseline(search)
    assert not search.history.baseline.ok and timeout_s(search) == 45.0
    explore(search, search.proposer())
    assert search.history.best is not None and timeout_s(search) == 20.0


def test_a_loss_that_is_finite_in_none_of_three_unlike_configs_ends_the_search(tmp_path):
    search = make_search(tmp_path, runner := Failing(lambda config: True, Kind.NONFINITE), budget_s=200.0)
    measure_baseline(search)
    with pytest.raises(TaskError, match="3 different configs failed with this error, and none ran"):
        explore(search, search.proposer())
    assert len({config.replace(batch_size=1, accumulation_steps=1) for config in runner.configs}) == 3


class Erring(ClosedFormRunner):
    """Every config with a technique of `fails` ends with an error whose figures depend on the config."""

    own_fault = False
    fails = ("off", "bf16", "fp16")

    def outcome_of(self, config, settings):
        if config["amp"] not in self.fails:
            return super().outcome_of(config, settings)
        self.configs.append(config)
        cause = f"ValueError: expected {config.batch_size} rows"
        return Outcome(kind=Kind.ERROR, cause=cause, detail="line 7", own_fault=self.own_fault, wall_s=0.1)


@pytest.mark.parametrize(("own_fault", "expected"), [(False, TaskError), (True, OwnFault)])
@pytest.mark.parametrize("sampler", ["cost-model", "random"])
def test_the_same_error_from_three_unlike_configs_ends_the_search_with_it(tmp_path, sampler, own_fault, expected):
    runner = Erring()
    runner.own_fault = own_fault
    search = make_search(tmp_path, runner, sampler=sampler)
    with pytest.raises(expected, match=r"expected \d+ rows; 3 different configs") as raised:
        finish(search)
    assert raised.value.frames == "line 7"
    assert len({config.replace(batch_size=1, accumulation_steps=1) for config in runner.configs}) == 3


def test_an_error_of_many_configs_does_not_end_a_search_in_which_something_ran(tmp_path):
    runner = Erring()
    runner.fails = ("bf16", "fp16")
    search = make_search(tmp_path, runner, sampler="random", num_trials=12)
    measure_baseline(search)
    explore(search, search.proposer())
    assert len(runner.configs) == 12


def test_configs_that_differ_in_the_batch_alone_are_not_unlike(tmp_path):
    runner = Erring()
    fix = {"amp": "off", "checkpoint_segments": 0, "optimizer_impl": "default"}
    search = make_search(tmp_path, runner, sampler="random", fix=fix)
    measure_baseline(search)
    explore(search, search.proposer())
    assert len(runner.configs) > 3


@pytest.mark.parametrize("error", [OverflowError("math range error"), LinAlgError("not positive definite")])
@pytest.mark.parametrize("broken", ["next", "predict", "ranked"])
def test_models_that_cannot_be_computed_leave_the_starting_design_and_are_told_of_once(
    tmp_path, monkeypatch, broken, error
):
    def fail(*args):
        raise error

    monkeypatch.setattr(Acquisition, broken, fail)
    notes = Notes()
    search = make_search(tmp_path, runner := ClosedFormRunner(), sampler="cost-model", listener=notes, num_trials=15)
    standing = finish(search)
    assert [text for text in notes.warnings if str(error) in text] == notes.warnings[:1]
    start = starting_configs(search.history.space, baseline_fits=True, objective=search.history.objective)
    if broken == "next":
        assert {config for config, _ in start} & set(runner.configs)
    assert standing.answer.config["amp"] == "bf16"


@pytest.mark.parametrize("kind", [Kind.TIMEOUT, Kind.CRASHED])
@pytest.mark.parametrize("given", [True, False])
def test_a_baseline_that_the_user_did_not_state_and_that_hangs_or_crashes_is_halved(tmp_path, kind, given):
    search = make_search(
        tmp_path,
        runner := Failing(lambda config: config.batch_size > 1, kind),
        inspection=inspection(baseline_given=given),
    )
    measure_baseline(search)
    assert [config.batch_size for config in runner.configs] == ([4] if given else [4, 2, 1])
    assert search.history.space.baseline.batch_size == (4 if given else 1)


def test_a_probe_that_a_batch_system_killed_with_the_search_says_nothing_of_its_config(tmp_path):
    runner = Failing(lambda config: True)
    search = make_search(tmp_path, runner, interrupted=lambda: bool(runner.configs))
    measure_baseline(search)
    assert len(runner.configs) == 1 and not search.history.searched
    assert load_study(tmp_path / "closed.db").num_lost == 1
