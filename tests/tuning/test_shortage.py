"""When nothing fits: a search ends after a few hopeless probes, says how much is needed, and never leaves what is fixed."""

from dataclasses import replace

import pytest

from autotune.records.outcome import Kind, Outcome
from autotune.techniques import find_techniques
from autotune.tuning.recommend import NothingFeasible
from autotune.tuning.search import answer
from tests.closed_form import MIB, ClosedFormRunner, inspection, make_search
from tests.rough_world import NoisyPeaks

techniques = find_techniques()

FOUND = inspection()


class Huge(ClosedFormRunner):
    """Nothing fits; the limit is 1000 MiB."""

    def peak_bytes(self, config):
        return super().peak_bytes(config) + 1000 * MIB


@pytest.mark.parametrize("sampler", ["cost-model", "gp"])
@pytest.mark.parametrize("traced", [True, False])
def test_after_a_few_hopeless_probes_a_search_ends_with_the_predicted_need(tmp_path, sampler, traced):
    runner = Huge()
    peaks = NoisyPeaks(runner) if traced else None
    search = make_search(tmp_path, runner, inspection=FOUND, sampler=sampler, peaks=peaks)
    told = r"predicted to need about 1\.\d+ GiB, .* 1000 MiB leaves 950 MiB" if traced else "needs at least"
    with pytest.raises(NothingFeasible, match=told):
        answer(search)
    assert len(runner.configs) <= (5 if traced else 8)


def test_where_the_batch_must_stay_whole_a_smaller_global_batch_is_named(tmp_path):
    baseline = techniques.complete({"batch_size": 96}, global_batch=96).as_dict()
    whole = inspection(batch=replace(FOUND.batch, accumulation_steps=(1,), stays_whole=True), baseline=baseline)
    search = make_search(tmp_path, Huge(), inspection=whole, sampler="cost-model", num_trials=4)
    with pytest.raises(NothingFeasible, match=r"the batch of 96 is not cut, .*: a smaller --global-batch takes less"):
        answer(search)


def test_a_baseline_that_was_not_stated_is_halved_at_once_to_what_may_fit(tmp_path):
    baseline = techniques.complete({"batch_size": 96}, global_batch=96).as_dict()
    found = inspection(baseline=baseline, baseline_given=False)
    runner = ClosedFormRunner()
    search = make_search(
        tmp_path, runner, inspection=found, peaks=NoisyPeaks(runner), sampler="cost-model", num_trials=3
    )
    answer(search)
    assert [config.batch_size for config in runner.configs[:2]] == [96, 12]


def test_a_prediction_that_is_wrong_does_not_end_a_search(tmp_path):
    """Twice as much is predicted as is needed, and yet the search finds what fits."""
    runner = ClosedFormRunner()
    large = techniques.complete({"batch_size": 48}, global_batch=96).as_dict()
    found = inspection(baseline=large)
    search = make_search(
        tmp_path, runner, inspection=found, peaks=NoisyPeaks(Huge()), sampler="cost-model", num_trials=12
    )
    answer(search)
    assert search.history.best is not None


def test_where_nothing_fits_that_is_fixed_the_baseline_is_no_answer_and_it_is_said_what_would_fit(tmp_path):
    runner = ClosedFormRunner()
    fix = {"batch_size": 48, "checkpoint_segments": 0}
    search = make_search(tmp_path, runner, inspection=FOUND, fix=fix, sampler="cost-model", peaks=NoisyPeaks(runner))
    with pytest.raises(NothingFeasible, match="nothing feasible with batch_size=48, checkpoint_segments=0") as raised:
        answer(search)
    said = str(raised.value)
    assert raised.value.exit_code == 1 and search.history.baseline.ok
    assert "batch_size=16 is predicted to fit" in said and "checkpoint_segments=6 is predicted to fit" in said
    assert "the baseline (batch 4 x24) fits" in said and "goes on" not in said


def test_where_time_was_up_before_all_that_may_fit_was_tried_it_is_said(tmp_path):
    runner = ClosedFormRunner()
    peaks = NoisyPeaks(runner)
    fix = {"batch_size": 48}
    search = make_search(tmp_path, runner, inspection=FOUND, fix=fix, sampler="cost-model", peaks=peaks, num_trials=1)
    with pytest.raises(
        NothingFeasible, match=r"the next to try \(.*\) may fit: the same command with a larger --budget"
    ):
        answer(search)


def test_where_no_probe_failed_for_lack_of_memory_nothing_is_said_to_fit(tmp_path):
    class Nan(ClosedFormRunner):
        def outcome_of(self, config, settings):
            return Outcome(kind=Kind.NONFINITE, cause="the loss was nan by optimizer step 1")

    search = make_search(tmp_path, Nan(), inspection=FOUND, sampler="cost-model", num_trials=2)
    with pytest.raises(NothingFeasible, match=r"the loss was nan .*; not all was tried \(next: ") as raised:
        answer(search)
    assert "fit" not in str(raised.value)


@pytest.mark.parametrize("sampler", ["cost-model", pytest.param("gp", marks=pytest.mark.slow)])
def test_while_nothing_that_is_fixed_fits_everything_that_may_is_tried(tmp_path, sampler):
    runner = ClosedFormRunner()
    peaks = NoisyPeaks(runner)
    search = make_search(tmp_path, runner, inspection=FOUND, fix={"batch_size": 48}, sampler=sampler, peaks=peaks)
    result = answer(search)
    assert result.config["batch_size"] == 48 and result.config["checkpoint_segments"] == 6
    assert any(trial.outcome.kind is Kind.OOM for trial in search.history.searched) or sampler == "cost-model"


def test_what_is_fixed_is_not_left_though_the_baseline_is_faster(tmp_path):
    fix = {"checkpoint_segments": 6, "amp": "off", "batch_size": 4}
    search = make_search(tmp_path, ClosedFormRunner(), inspection=FOUND, fix=fix, sampler="cost-model")
    result = answer(search)
    assert result.config["checkpoint_segments"] == 6 and result.verdict == "slower"
    assert result.baseline is not None and result.baseline.config["checkpoint_segments"] == 0
