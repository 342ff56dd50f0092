"""The search loop: what is probed, in what order, and what never is."""

import time
from dataclasses import replace

import pytest
from numpy.linalg import LinAlgError

from autotune.errors import OwnFault, TaskError
from autotune.proposers.acquisition import Advisor
from autotune.proposers.design import one_change_back, starting_configs
from autotune.records.config import Config
from autotune.records.outcome import Kind, Outcome
from autotune.records.settings import ProbeSettings
from autotune.runners.local import ProbeFault
from autotune.study.reading import load_study
from autotune.tuning.events import Listener, Note
from tests.closed_form import LIMIT_BYTES, ClosedFormProber, inspection, make_loop
from tests.rough_world import NoisyPeaks


def finish(loop):
    loop.measure_baseline(given=True)
    loop.explore()
    loop.undo_changes()
    return loop.run_play_off()


def test_the_baseline_is_probed_first(tmp_path):
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, num_trials=3)
    finish(loop)
    assert prober.configs[0] == loop.space.baseline


def test_no_config_is_probed_twice_outside_the_play_off(tmp_path):
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, num_trials=20)
    loop.measure_baseline(given=True)
    loop.explore()
    loop.undo_changes()
    assert len(prober.configs) == len(set(prober.configs)) > 10


def test_nothing_larger_than_what_ran_out_of_memory_is_probed(tmp_path):
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, num_trials=40, sampler="random")
    loop.measure_baseline(given=True)
    loop.explore()
    walls: dict[Config, int] = {}
    for config in prober.configs:
        group = config.replace(batch_size=1, accumulation_steps=1)
        assert config.batch_size < walls.get(group, 10**9)
        if prober.peak_bytes(config) > 0.95 * LIMIT_BYTES:
            walls[group] = min(config.batch_size, walls.get(group, 10**9))
    assert walls


def test_a_change_is_not_undone_where_that_is_predicted_not_to_fit(tmp_path):
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, sampler="cost-model", peaks=NoisyPeaks(prober))
    loop.measure_baseline(given=True)
    best = loop.space.complete({"amp": "bf16", "optimizer_impl": "fused", "batch_size": 16})
    loop._probe_once(best, "search", "")
    before = len(prober.configs)
    loop.undo_changes()
    undone = [config for config, _ in one_change_back(best, loop.space)]
    too_large = [config for config in undone if prober.peak_bytes(config) > LIMIT_BYTES]
    assert loop.best[0] == best and too_large
    assert set(prober.configs[before:]) == set(undone) - set(too_large)


def test_every_config_keeps_the_global_batch(tmp_path):
    prober = ClosedFormProber()
    finish(make_loop(tmp_path, prober, num_trials=30, sampler="random"))
    assert {config.samples_per_step for config in prober.configs} == {96}


@pytest.mark.parametrize("sampler", ["gp", "tpe"])
def test_the_answer_is_within_three_percent_of_the_optimum_in_thirty_probes(tmp_path, sampler):
    prober = ClosedFormProber(noise=0.005)
    loop = make_loop(tmp_path, prober, num_trials=30, sampler=sampler)
    standing = finish(loop)
    optimum = prober.best_samples_per_s(loop.space, loop.objective.usable_bytes)
    assert prober.samples_per_s(standing.answer.config) >= 0.97 * optimum


def test_a_grid_covers_the_whole_space(tmp_path):
    fix = {"checkpoint_segments": 0, "optimizer_impl": "default", "amp": "off"}
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, sampler="grid", fix=fix)
    loop.measure_baseline(given=True)
    loop.explore()
    smallest_failure = min(c.batch_size for c in prober.configs if prober.peak_bytes(c) > 0.95 * LIMIT_BYTES)
    assert {c.batch_size for c in prober.configs} >= {
        c.batch_size for c in loop.space if c.batch_size < smallest_failure
    }


def test_the_budget_ends_the_search(tmp_path):
    prober = ClosedFormProber(seconds=0.05)
    loop = make_loop(tmp_path, prober, budget_s=2.0, sampler="random")
    finish(loop)
    assert loop.elapsed_s < 4


def test_the_number_of_trials_ends_the_search(tmp_path):
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, num_trials=5)
    loop.measure_baseline(given=True)
    loop.explore()
    loop.undo_changes()
    assert len(prober.configs) == 5


def test_a_resumed_search_measures_nothing_again(tmp_path):
    first = ClosedFormProber()
    loop = make_loop(tmp_path, first, num_trials=8)
    loop.measure_baseline(given=True)
    loop.explore()
    second = ClosedFormProber()
    resumed = make_loop(tmp_path, second, num_trials=8)
    assert len(resumed.probed()) == 8
    resumed.measure_baseline(given=True)
    resumed.explore()
    assert not set(first.configs) & set(second.configs)


def test_trials_left_running_by_a_dead_search_are_closed(tmp_path):
    loop = make_loop(tmp_path, ClosedFormProber())
    loop.store.begin(loop.space.baseline, loop.space)
    resumed = make_loop(tmp_path, ClosedFormProber())
    resumed.measure_baseline(given=True)
    import optuna

    states = [
        trial.state.name for trial in optuna.load_study(study_name="closed", storage=loop.store.place.storage).trials
    ]
    assert states == ["FAIL", "COMPLETE"]


def test_an_unstated_baseline_is_halved_until_it_fits(tmp_path):
    from autotune import techniques

    found = inspection(
        baseline=techniques.complete({"batch_size": 96}, global_batch=96).as_dict(), baseline_given=False
    )
    loop = make_loop(tmp_path, ClosedFormProber(), inspection=found)
    loop.measure_baseline(given=False)
    assert loop.space.baseline.batch_size == 12
    assert loop.baseline is not None and loop.baseline.ok


def test_a_stated_baseline_that_does_not_fit_is_kept_as_such_and_the_search_finds_what_does(tmp_path):
    from autotune import techniques

    found = inspection(baseline=techniques.complete({"batch_size": 96}, global_batch=96).as_dict())
    loop = make_loop(tmp_path, ClosedFormProber(), inspection=found, num_trials=10)
    standing = finish(loop)
    assert loop.baseline is not None and loop.baseline.kind is Kind.OOM
    assert standing.answer is not None and standing.gain is None


def test_infeasible_trials_are_complete_with_a_positive_constraint(tmp_path):
    import optuna

    loop = make_loop(tmp_path, ClosedFormProber(), num_trials=30, sampler="random")
    loop.measure_baseline(given=True)
    loop.explore()
    trials = optuna.load_study(study_name="closed", storage=loop.store.place.storage).trials
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    for trial in trials:
        assert set(trial.constraints) == {"infeasibility"}
        assert (trial.constraints["infeasibility"] <= 0) == trial.user_attrs["feasible"]
    assert not all(trial.user_attrs["feasible"] for trial in trials)


def test_the_best_is_compared_with_each_of_its_changes_undone(tmp_path):
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, num_trials=25)
    loop.measure_baseline(given=True)
    loop.explore()
    loop.undo_changes()
    best = loop.best[0]
    for name in best.differences(loop.space.baseline):
        if name != "accumulation_steps":
            undone = loop.space.complete({**best.as_dict(), name: loop.space.baseline[name]})
            assert undone in prober.configs or prober.peak_bytes(undone) > 0.95 * LIMIT_BYTES


def test_an_interrupt_ends_the_search_after_the_running_probe(tmp_path):
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, interrupted=lambda: len(prober.configs) >= 3)
    loop.measure_baseline(given=True)
    loop.explore()
    assert len(prober.configs) == 3


def test_a_fault_of_the_machinery_is_no_outcome_and_three_end_the_search(tmp_path):
    class Broken(ClosedFormProber):
        def run(self, config, settings) -> Outcome:
            if len(self.configs) >= 2:
                raise ProbeFault("the fork server died")
            return super().run(config, settings)

    loop = make_loop(tmp_path, Broken(), sampler="random")
    loop.measure_baseline(given=True)
    with pytest.raises(ProbeFault):
        loop.explore()
    assert len(loop.probed()) == 2


@pytest.mark.parametrize("given", [True, False])
def test_a_baseline_is_probed_again_after_a_fault_of_the_machinery(tmp_path, given):
    class Flaky(ClosedFormProber):
        def run(self, config, settings) -> Outcome:
            outcome = super().run(config, settings)
            if len(self.configs) < 3:
                raise ProbeFault("the fork server died")
            return outcome

    loop = make_loop(tmp_path, prober := Flaky())
    loop.measure_baseline(given=given)
    assert prober.configs == [loop.space.baseline] * 3
    assert loop.baseline is not None and loop.baseline.ok
    assert loop.settings.slowest_samples_per_s > 0


class Erring(ClosedFormProber):
    """Every config with a technique of `fails` ends with an error whose figures depend on the config."""

    own_fault = False
    fails = ("off", "bf16", "fp16")

    def run(self, config, settings) -> Outcome:
        if config["amp"] not in self.fails:
            return super().run(config, settings)
        self.configs.append(config)
        cause = f"ValueError: expected {config.batch_size} rows"
        return Outcome(kind=Kind.ERROR, cause=cause, detail="line 7", own_fault=self.own_fault, wall_s=0.1)


@pytest.mark.parametrize(("own_fault", "expected"), [(False, TaskError), (True, OwnFault)])
@pytest.mark.parametrize("sampler", ["cost-model", "random"])
def test_the_same_error_from_three_unlike_configs_ends_the_search_with_it(tmp_path, sampler, own_fault, expected):
    prober = Erring()
    prober.own_fault = own_fault
    loop = make_loop(tmp_path, prober, sampler=sampler)
    with pytest.raises(expected, match=r"expected \d+ rows; 3 unlike configs") as raised:
        finish(loop)
    assert raised.value.frames == "line 7"
    assert len({config.replace(batch_size=1, accumulation_steps=1) for config in prober.configs}) == 3


def test_an_error_of_many_configs_does_not_end_a_search_in_which_something_ran(tmp_path):
    prober = Erring()
    prober.fails = ("bf16", "fp16")
    loop = make_loop(tmp_path, prober, sampler="random", num_trials=12)
    loop.measure_baseline(given=True)
    loop.explore()
    assert len(prober.configs) == 12


def test_configs_that_differ_in_the_batch_alone_are_not_unlike(tmp_path):
    prober = Erring()
    fix = {"amp": "off", "checkpoint_segments": 0, "optimizer_impl": "default"}
    loop = make_loop(tmp_path, prober, sampler="random", fix=fix)
    loop.measure_baseline(given=True)
    loop.explore()
    assert len(prober.configs) > 3


@pytest.mark.parametrize("error", [OverflowError("math range error"), LinAlgError("not positive definite")])
@pytest.mark.parametrize("broken", ["next", "forecast", "ranked"])
def test_models_that_cannot_be_computed_leave_the_starting_design_and_are_told_of_once(
    tmp_path, monkeypatch, broken, error
):
    def fail(*args):
        raise error

    monkeypatch.setattr(Advisor, broken, fail)
    notes = Notes()
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, sampler="cost-model", listener=notes, num_trials=15)
    standing = finish(loop)
    assert [note for note in notes.texts if str(error) in note] == notes.texts[:1]
    start = starting_configs(loop.space, baseline_fits=True, objective="throughput")
    if broken == "next":
        assert {config for config, _ in start} & set(prober.configs)
    assert standing.answer.config["amp"] == "bf16"


class Notes(Listener):
    def __init__(self):
        self.texts = []

    def on(self, event):
        if isinstance(event, Note) and event.warning:
            self.texts.append(event.text)


def test_three_faults_of_the_baseline_end_the_search(tmp_path):
    class Broken(ClosedFormProber):
        def run(self, config, settings) -> Outcome:
            super().run(config, settings)
            raise ProbeFault("the fork server died")

    with pytest.raises(ProbeFault):
        make_loop(tmp_path, prober := Broken()).measure_baseline(given=True)
    assert len(prober.configs) == 3


def test_the_same_seed_gives_the_same_search(tmp_path):
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        prober = ClosedFormProber()
        loop = make_loop(tmp_path / name, prober, num_trials=15, seed=3)
        loop.measure_baseline(given=True)
        loop.explore()
        runs.append(prober.configs)
    assert runs[0] == runs[1]


def test_a_fixed_technique_is_in_every_config_but_the_baseline(tmp_path):
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, num_trials=12, fix={"amp": "bf16"})
    finish(loop)
    assert {c["amp"] for c in prober.configs if c != loop.space.baseline} == {"bf16"}
    assert loop.best[0]["amp"] == "bf16"


def test_an_unstated_baseline_is_halved_until_it_leaves_the_headroom(tmp_path):
    from autotune import techniques

    class Tight(ClosedFormProber):
        def peak_bytes(self, config):
            return int(0.97 * LIMIT_BYTES) if config.batch_size == 12 else super().peak_bytes(config)

    found = inspection(
        baseline=techniques.complete({"batch_size": 12}, global_batch=96).as_dict(), baseline_given=False
    )
    loop = make_loop(tmp_path, Tight(), inspection=found)
    loop.measure_baseline(given=False)
    assert loop.space.baseline.batch_size == 6


def test_a_baseline_that_timed_out_is_tried_again_with_more_patience(tmp_path):
    class Slow(ClosedFormProber):
        def run(self, config, settings):
            self.configs.append(config)
            return Outcome(kind=Kind.TIMEOUT, cause="killed", wall_s=settings.timeout_s)

    hasty = ProbeSettings(device="cpu", memory_limit_bytes=LIMIT_BYTES, timeout_s=20)
    make_loop(tmp_path, Slow(), settings=hasty).measure_baseline(given=True)
    patient = ClosedFormProber()
    loop = make_loop(tmp_path, patient, settings=hasty.replace(timeout_s=200))
    loop.measure_baseline(given=True)
    assert loop.baseline is not None and loop.baseline.ok


class Failing(ClosedFormProber):
    """Some configs end otherwise than by running."""

    def __init__(self, fails, kind=Kind.CRASHED, wall_s=0.1):
        super().__init__()
        self.fails, self.kind, self.wall_s = fails, kind, wall_s

    def run(self, config, settings):
        outcome = super().run(config, settings)
        return Outcome(kind=self.kind, cause="it did", wall_s=self.wall_s) if self.fails(config) else outcome


def uses_bf16(config):
    return config["amp"] == "bf16"


@pytest.mark.parametrize("sampler", ["random", "cost-model"])
def test_what_crashed_may_be_probed_again_when_the_search_is_resumed(tmp_path, sampler):
    first = Failing(uses_bf16)
    finish(make_loop(tmp_path, first, num_trials=12, sampler=sampler))
    crashed = {config for config in first.configs if uses_bf16(config)}
    healthy = ClosedFormProber()
    loop = make_loop(tmp_path, healthy, num_trials=12, sampler=sampler)
    standing = finish(loop)
    assert crashed & set(healthy.configs)
    assert standing.answer.config["amp"] == "bf16"
    study = load_study(tmp_path / "closed.db")
    assert any(probe.outcome.kind is Kind.CRASHED for probe in study.probes)  # history stays
    assert standing.answer.config.as_dict() in [measured.config for measured in study.measured_configs()]


def test_what_crashed_twice_is_not_tried_a_third_time(tmp_path):
    fix = {"checkpoint_segments": 0, "optimizer_impl": "default"}
    crashes = []
    for _ in range(3):
        prober = Failing(uses_bf16)
        loop = make_loop(tmp_path, prober, sampler="grid", fix=fix)
        loop.measure_baseline(given=True)
        loop.explore()
        crashes.append({config for config in prober.configs if uses_bf16(config)})
    assert crashes[0] and crashes[1] == crashes[0] and not crashes[2]


def test_within_one_search_what_crashed_is_not_tried_again(tmp_path):
    prober = Failing(uses_bf16)
    loop = make_loop(tmp_path, prober, sampler="grid", fix={"checkpoint_segments": 0, "optimizer_impl": "default"})
    loop.measure_baseline(given=True)
    loop.explore()
    assert len(prober.configs) == len(set(prober.configs))


def test_a_time_out_is_tried_again_with_more_patience_only(tmp_path):
    fix = {"checkpoint_segments": 0, "optimizer_impl": "default"}
    tried = []
    for timeout_s in (20.0, 20.0, 60.0, 60.0):
        prober = Failing(uses_bf16, Kind.TIMEOUT, wall_s=timeout_s)
        settings = ProbeSettings(device="cpu", memory_limit_bytes=LIMIT_BYTES, timeout_s=timeout_s)
        loop = make_loop(tmp_path, prober, sampler="grid", fix=fix, timeout_s=timeout_s, settings=settings)
        loop.measure_baseline(given=True)
        loop.explore()
        tried.append(sum(map(uses_bf16, prober.configs)))
    assert tried[0] == tried[2] > 0 and tried[1] == tried[3] == 0


def test_a_time_out_is_held_against_the_patience_that_the_baseline_asks_for(tmp_path):
    """The time-out before the baseline is measured is a longer one."""
    fix = {"checkpoint_segments": 0, "optimizer_impl": "default"}
    settings = ProbeSettings(device="cpu", memory_limit_bytes=LIMIT_BYTES, timeout_s=120.0)
    tried = []
    for _ in range(2):
        prober = Failing(uses_bf16, Kind.TIMEOUT, wall_s=20.0)
        loop = make_loop(tmp_path, prober, sampler="grid", fix=fix, settings=settings)
        loop.measure_baseline(given=True)
        loop.explore()
        tried.append(sum(map(uses_bf16, prober.configs)))
    assert tried[0] > 0 and tried[1] == 0


@pytest.mark.parametrize("kind", [Kind.CRASHED, Kind.ERROR, Kind.NONFINITE, Kind.TIMEOUT])
def test_a_baseline_that_failed_is_probed_again_when_the_search_is_resumed(tmp_path, kind):
    for _ in range(2):
        make_loop(tmp_path, Failing(lambda config: True, kind, wall_s=60.0)).measure_baseline(given=True)
    loop = make_loop(tmp_path, ClosedFormProber())
    loop.measure_baseline(given=True)
    assert loop.baseline is not None and loop.baseline.ok


def test_a_baseline_that_ran_out_of_memory_is_not(tmp_path):
    make_loop(tmp_path, Failing(lambda config: True, Kind.OOM)).measure_baseline(given=True)
    loop = make_loop(tmp_path, prober := ClosedFormProber())
    loop.measure_baseline(given=True)
    assert not prober.configs and loop.baseline.kind is Kind.OOM


def test_with_the_objective_memory_what_is_known_is_held_against_a_baseline_that_is_measured_late(tmp_path):
    from autotune.records.objective import Objective

    objective = Objective(name="memory", memory_limit_bytes=LIMIT_BYTES, headroom=0.05)
    baseline = make_loop(tmp_path, ClosedFormProber()).space.baseline
    first = make_loop(tmp_path, Failing(lambda config: config == baseline), objective=objective, num_trials=8)
    first.measure_baseline(given=True)
    first.explore()
    loop = make_loop(tmp_path, ClosedFormProber(), objective=objective)
    loop.measure_baseline(given=True)
    assert loop.best is not None and loop.objective.feasible(loop.best[1])


def test_a_trial_that_was_measured_but_not_told_is_kept(tmp_path):
    """A search may be killed between the two."""
    loop = make_loop(tmp_path, ClosedFormProber())
    trial = loop.store.begin(loop.space.baseline, loop.space)
    loop.store.describe(trial, loop.space.baseline, stage="baseline", reason="", forecast=None)
    outcome = ClosedFormProber().run(loop.space.baseline, loop.settings)
    for key, value in {"score": 50.0, "feasible": True, "disturbed": False, "outcome": outcome.to_dict()}.items():
        trial.set_user_attr(key, value)
    resumed = make_loop(tmp_path, ClosedFormProber())
    assert [probe.config for probe in resumed.probed()] == [resumed.space.baseline]


def test_a_probe_never_gets_more_time_than_the_budget_and_one_time_out(tmp_path):
    class Watching(ClosedFormProber):
        timeouts: list[float]

        def run(self, config, settings):
            self.timeouts = [*getattr(self, "timeouts", []), settings.timeout_s]
            return super().run(config, settings)

    prober = Watching()
    started = time.monotonic() - 130
    loop = make_loop(tmp_path, prober, budget_s=100.0, started=started, num_trials=2)
    loop.measure_baseline(given=True)
    assert max(prober.timeouts) <= 30


def test_what_was_dropped_as_inexact_is_no_longer_the_best(tmp_path):
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, num_trials=15)
    loop.measure_baseline(given=True)
    loop.explore()
    assert loop.best[0]["amp"] == "bf16"
    loop.drop("amp", "bf16")
    assert loop.best[0]["amp"] != "bf16"
    assert not any(config["amp"] == "bf16" for config in loop.finalists())


def test_with_the_objective_memory_smaller_batches_and_checkpointing_come_first(tmp_path):
    from autotune.records.objective import Objective

    prober = ClosedFormProber()
    objective = Objective(name="memory", memory_limit_bytes=LIMIT_BYTES, headroom=0.05)
    loop = make_loop(tmp_path, prober, objective=objective, num_trials=10)
    standing = finish(loop)
    assert prober.peak_bytes(standing.answer.config) < prober.peak_bytes(loop.space.baseline)
    assert prober.samples_per_s(standing.answer.config) >= 0.97 * prober.samples_per_s(loop.space.baseline)


def test_the_sum_of_what_usually_helps_is_taken_apart(tmp_path):
    """Before the sampler: one of the parts may hurt here."""
    prober = ClosedFormProber()
    loop = make_loop(tmp_path, prober, num_trials=14)
    loop.measure_baseline(given=True)
    loop.explore()
    sum_of_all = loop.space.complete({"amp": "bf16", "optimizer_impl": "fused"})
    assert sum_of_all in prober.configs
    reasons = {probe.stage for probe in loop.probed()}
    assert "ablation" in reasons


def test_every_probe_but_the_play_offs_keeps_what_was_predicted_of_it(tmp_path):
    loop = make_loop(tmp_path, ClosedFormProber(noise=0.01), sampler="cost-model")
    finish(loop)
    probes = load_study(tmp_path / "closed.db").probes
    assert {probe.stage for probe in probes if probe.forecast is None} == {"play-off"}
    assert all(probe.stage != "play-off" for probe in probes if probe.forecast)
    later = [probe.forecast for probe in probes if probe.stage == "search" and probe.forecast]
    assert len(later) > 2
    assert all(f.samples_per_s and f.peak_bytes and f.chance_to_win and f.reason for f in later)


def test_the_cost_model_ends_the_search_when_nothing_is_likely_to_win(tmp_path):
    prober = ClosedFormProber(noise=0.005)
    loop = make_loop(tmp_path, prober, sampler="cost-model")
    loop.measure_baseline(given=True)
    loop.explore()
    best = max(map(prober.samples_per_s, prober.configs))
    assert len(prober.configs) < 25
    assert best >= 0.97 * prober.best_samples_per_s(loop.space, loop.objective.usable_bytes)


def test_a_config_that_only_just_fitted_is_confirmed_after_those_that_surely_fit(tmp_path):
    loop = make_loop(tmp_path, ClosedFormProber(noise=0.005), sampler="cost-model")
    loop.measure_baseline(given=True)
    loop.explore()
    finalists = loop.finalists()
    tight = [ClosedFormProber().peak_bytes(config) > 0.97 * loop.objective.usable_bytes for config in finalists]
    assert len(finalists) > 1 and tight == sorted(tight)


@pytest.mark.parametrize("anything_fits", [True, False])
def test_while_nothing_fits_no_time_is_left_for_a_play_off(tmp_path, anything_fits):
    class TakingTime(Failing):
        def run(self, config, settings):
            loop.started -= 10
            return replace(super().run(config, settings), wall_s=10.0)

    prober = TakingTime(lambda config: not anything_fits, Kind.NONFINITE)
    loop = make_loop(tmp_path, prober, budget_s=200.0, sampler="random")
    loop.measure_baseline(given=True)
    loop.explore()
    assert len(prober.configs) == (11 if anything_fits else 18)


def test_without_a_baseline_that_runs_what_does_run_says_how_long_a_probe_may_take(tmp_path):
    prober = Failing(lambda config: config.batch_size == 4, Kind.OOM)  # the baseline's
    settings = ProbeSettings(device="cpu", memory_limit_bytes=LIMIT_BYTES, timeout_s=120.0)
    loop = make_loop(tmp_path, prober, settings=settings, num_trials=4, budget_s=300.0)
    loop.measure_baseline(given=True)
    assert not loop.baseline.ok and loop.settings.timeout_s == 45.0
    loop.explore()
    assert loop.best is not None and loop.settings.timeout_s == 20.0
