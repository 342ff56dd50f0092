"""What may be recommended: what was compared with plain fp32 on the user's own model, and passed."""

import json
from dataclasses import replace

import pytest

from autotune.errors import ConfigError
from autotune.records.config import World
from autotune.records.objective import OBJECTIVES
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Result
from autotune.runners.jobs import NotCompared
from autotune.space import CUT
from autotune.techniques import find_techniques
from autotune.tuning.clearance import Clearance
from autotune.tuning.confirm import SURE_TO_FIT, near_the_best, with_the_simplest
from autotune.tuning.recommend import Interrupted, NothingFeasible
from autotune.tuning.search import answer
from tests.closed_form import LIMIT_BYTES, measurement
from tests.tuning.test_search import FOUND, OOM, Listed, Staged, passed_check, recommender

techniques = find_techniques()

FAILED = replace(passed_check(), passed=False, reason="the gradient differs by 3")
TELLS_NOTHING = replace(passed_check(), exact=False, passed=None, reason="it tells little")
TIMED_OUT = Outcome(kind=Kind.TIMEOUT, cause="killed after 10 s, during checks")


class Compared(Staged):
    """`found` says what a comparison of a config finds; `order` tells what came after what."""

    def __init__(self, found=lambda config: passed_check(), **named):
        self.found = found
        super().__init__(**named)
        self.order = []

    def check_of(self, config, settings, batch_size):
        self.checked.append(config)
        self.order.append("compared")
        return self.found(config)

    def in_play_off(self, config, settings, outcome):
        self.order.append("played")
        return outcome


def with_bf16(found):
    return lambda config: found if config["amp"] == "bf16" else passed_check()


def with_fused(found):
    return lambda config: found if config["optimizer_impl"] == "fused" else passed_check()


@pytest.mark.parametrize("found", [FAILED, TELLS_NOTHING, pytest.param(TIMED_OUT, marks=pytest.mark.slow), OOM])
def test_what_failed_or_did_not_finish_or_tells_nothing_is_not_played_and_the_next_best_that_passed_is_the_answer(
    tmp_path, found
):
    made = recommender(tmp_path, runner := Compared(with_bf16(found)), sampler="cost-model", num_trials=None)
    result = answer(made)
    assert result.config["amp"] == "fp16" and result.confirmed and result.verdict == "faster"
    assert not [config for config in runner.played if config["amp"] == "bf16"]
    assert any(config["amp"] == "bf16" for config in runner.configs)  # it was the fastest in the search
    assert [text for text in result.warnings if "amp=bf16" in text]
    assert result.checks[0].passed and not result.doubt


def test_the_answer_was_compared_before_the_play_off(tmp_path):
    result = answer(recommender(tmp_path, runner := Compared()))
    assert result.checks and runner.order.index("compared") < runner.order.index("played")
    assert "compared" not in runner.order[runner.order.index("played") :]


def test_the_exact_part_of_an_answer_is_held_to_the_bound_of_exact_techniques(tmp_path):
    """Together with bf16 its error would pass as that of bf16."""

    def found(config):
        return FAILED if config["optimizer_impl"] == "fused" and config["amp"] == "off" else passed_check()

    result = answer(recommender(tmp_path, Compared(found), sampler="cost-model", num_trials=None))
    assert (result.config["optimizer_impl"], result.config["amp"]) == ("default", "bf16")
    assert any(
        text.startswith("optimizer_impl=fused is left out: the gradient differs by 3") for text in result.warnings
    )


def test_changes_that_fail_only_together_are_barred_together(tmp_path):
    def found(config):
        return FAILED if config["optimizer_impl"] == "fused" and config["amp"] == "bf16" else passed_check()

    made = recommender(tmp_path, runner := Compared(found), sampler="cost-model", num_trials=None)
    result = answer(made)
    assert (result.config["optimizer_impl"], result.config["amp"]) == ("default", "bf16")
    assert {"fused"} & {config["optimizer_impl"] for config in made.history.space}
    assert not [config for config in runner.played if (config["optimizer_impl"], config["amp"]) == ("fused", "bf16")]


@pytest.mark.parametrize("found", [FAILED, TIMED_OUT])
def test_what_the_user_fixed_and_does_not_pass_is_no_answer_and_it_is_said_how_it_would_be(tmp_path, found):
    with pytest.raises(NothingFeasible, match=r"none may be recommended: amp=bf16 .*BASELINE"):
        answer(recommender(tmp_path, Compared(with_bf16(found)), fix={"amp": "bf16"}))


def test_what_the_baseline_does_already_is_not_held_against_an_answer(tmp_path):
    today = {"batch_size": 4, "amp": "bf16"}
    found = replace(FOUND, baseline=techniques.complete(today, global_batch=96).as_dict())
    made = recommender(tmp_path, runner := Compared(with_bf16(FAILED)), inspection=found, fix={"amp": "bf16"})
    result = answer(made)
    assert result.config["amp"] == "bf16" and result.verdict == "faster"
    assert runner.checked and not [config for config in runner.checked if config["amp"] == "bf16"]


def test_where_the_runner_sees_no_gradients_the_answer_stands_and_says_so(tmp_path):
    runner = Compared(lambda config: NotCompared(reason="the script keeps them to itself"))
    result = answer(recommender(tmp_path, runner))
    assert result.verdict == "faster" and not result.checks and not result.doubt
    assert (
        "the answer's gradients were not compared with plain fp32: the script keeps them to itself" in result.warnings
    )


def test_a_comparison_that_did_not_finish_is_made_again_when_the_search_goes_on_and_one_that_did_is_not(tmp_path):
    first = recommender(tmp_path, Compared(with_fused(TIMED_OUT)), sampler="cost-model", num_trials=None)
    result = answer(first)
    warning = next(text for text in result.warnings if "optimizer_impl=fused" in text)
    assert all(part in warning for part in ("not shown to train as plain fp32 does", "killed after 10 s", "--budget"))
    compared = [kept.changes for kept in first.store.facts.checks]
    assert compared and not any(("optimizer_impl", "fused") in changes for changes in compared)

    second = recommender(tmp_path, runner := Compared(), sampler="cost-model", num_trials=None)
    assert answer(second).config["optimizer_impl"] == "fused"
    assert all(config["optimizer_impl"] == "fused" for config in runner.checked)  # the others are known


def test_what_failed_is_left_out_when_the_search_goes_on(tmp_path):
    for _ in range(2):
        result = answer(recommender(tmp_path, runner := Compared(with_fused(FAILED)), sampler="cost-model"))
        assert result.config["optimizer_impl"] == "default"
        assert any("optimizer_impl=fused is left out: the gradient differs by 3" in text for text in result.warnings)
    assert not [config for config in runner.checked if config["optimizer_impl"] == "fused"]


def test_a_comparison_that_runs_out_of_memory_asks_for_memory(tmp_path):
    result = answer(recommender(tmp_path, Compared(with_fused(OOM)), sampler="cost-model", num_trials=None))
    said = next(text for text in result.warnings if "optimizer_impl=fused" in text)
    assert "oom: no memory" in said and "--memory-limit" in said


def test_what_no_time_is_left_to_compare_is_no_answer(tmp_path, monkeypatch):
    made = recommender(tmp_path, runner := Compared())

    def finalists_late(search):
        runner.waited_s += made.budget.budget_s + 1
        return list(search.history.feasible)[-1:]

    monkeypatch.setattr("autotune.tuning.clearance.finalists_of", finalists_late)
    result = answer(made)
    assert not runner.checked and result.config == made.history.space.baseline.as_dict()
    assert any("the budget was spent" in text and "--budget" in text for text in result.warnings)


def test_a_comparison_that_does_not_fit_is_made_with_fewer_samples(tmp_path):
    class Short(Compared):
        def check_of(self, config, settings, batch_size):
            sizes.append(batch_size)
            return passed_check() if batch_size == 1 else OOM

    sizes = []
    made = recommender(tmp_path, Short())
    assert Clearance(made).clear(made.history.space.complete({"optimizer_impl": "fused"}))
    assert list(dict.fromkeys(sizes)) == [4, 2, 1]


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_where_random_draws_hide_what_differs_in_micro_batches_the_rest_is_compared_on_the_whole_batch(
    tmp_path, monkeypatch, noise
):
    def compared(clearance, changes, timeout_s):
        if CUT in changes:
            return replace(passed_check(), exact=len(changes) == 1, noise=noise)
        whole.append(changes)
        return FAILED

    whole = []
    monkeypatch.setattr(Clearance, "_run", compared)
    made = recommender(tmp_path, Compared())
    cut = made.history.space.complete({"batch_size": 1, "amp": "bf16"})
    clearance = Clearance(made)
    assert clearance.clear(cut) == (noise == 0.0)
    assert clearance.is_cleared(cut) == (noise == 0.0)
    assert set(whole) == (set() if noise == 0.0 else {frozenset({("amp", "bf16")})})


def test_each_process_of_a_world_has_a_sample_and_each_micro_batch(tmp_path):
    class Short(Compared):
        def check_of(self, config, settings, batch_size):
            sizes.append(batch_size)
            return OOM

    sizes = []
    made = recommender(tmp_path, Short())
    made.settings = made.settings.replace(world=World(size=2))
    assert not Clearance(made).clear(made.history.space.complete({"optimizer_impl": "fused"}))
    assert list(dict.fromkeys(sizes)) == [4, 2]
    sizes.clear()
    cut = made.history.space.complete({"batch_size": 1})
    assert cut.accumulation_steps > made.history.space.baseline.accumulation_steps
    assert not Clearance(made).clear(cut)
    assert list(dict.fromkeys(sizes)) == [4]


def test_comparisons_take_no_more_than_their_share_of_the_budget(tmp_path):
    class SlowToCompare(Compared):
        def check_of(self, config, settings, batch_size):
            self.waited_s += 300.0
            return super().check_of(config, settings, batch_size)

    made = recommender(tmp_path, runner := SlowToCompare())  # a budget of 1000 s
    clearance, space = Clearance(made), made.history.space
    assert clearance.clear(space.complete({"optimizer_impl": "fused"}))
    assert not clearance.clear(space.complete({"checkpoint_segments": 2}))
    assert len(runner.checked) == 1 and any("had taken their share" in text for text in made.warnings)


def test_after_a_comparison_that_did_not_finish_the_next_gets_twice_the_time_as_long_as_none_has_passed(tmp_path):
    class SlowToCompare(Compared):
        def check_of(self, config, settings, batch_size):
            timeouts_s.append(settings.timeout_s)
            self.waited_s += min(400.0, settings.timeout_s)
            return passed_check() if settings.timeout_s > 250 else TIMED_OUT

    timeouts_s = []
    made = recommender(tmp_path, SlowToCompare())  # a budget of 1000 s
    clearance, space = Clearance(made), made.history.space
    assert not clearance.clear(space.complete({"optimizer_impl": "fused"}))
    assert clearance.clear(space.complete({"checkpoint_segments": 2}))
    assert timeouts_s == [150.0, 300.0]


def test_micro_batches_that_were_asked_for_as_another_training_are_not_compared(tmp_path):
    batch = replace(FOUND.batch, accumulation_steps=(1, 2, 4), optional_accumulation_steps=(8, 24))
    found = replace(FOUND, batch=batch, baseline=techniques.complete({"batch_size": 96}, global_batch=96).as_dict())
    made = recommender(tmp_path, runner := Compared(), inspection=found)
    clearance = Clearance(made)
    configs = [techniques.complete({"batch_size": size}, global_batch=96) for size in (48, 4)]
    assert all(map(clearance.clear, configs))
    assert [config.accumulation_steps for config in runner.checked] == [2]


def test_an_interrupted_search_shows_its_best_so_far_and_does_not_recommend_it(tmp_path):
    runner = Compared()
    made = recommender(tmp_path, runner, interrupted=lambda: len(runner.configs) >= 4)
    with pytest.raises(Interrupted) as raised:
        answer(made)
    result = raised.value.result
    assert result.config == made.history.best[0].as_dict() and not runner.checked
    assert result.doubt and any("no recommendation" in text for text in result.warnings)
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))).doubt == result.doubt
    with pytest.raises(ConfigError, match="--force"):
        result.export("json")
    assert json.loads(result.export("json", force=True).text) == result.config


def test_an_answer_of_an_earlier_version_that_failed_its_check_is_not_exported_unasked(tmp_path):
    result = replace(answer(recommender(tmp_path, Compared())), checks=(FAILED,))
    with pytest.raises(ConfigError, match="the gradient differs by 3"):
        result.export("json")


def test_at_least_the_two_largest_effects_are_told_with_intervals_where_time_was_short(tmp_path):
    class Timed(Compared):
        def outcome_of(self, config, settings):
            self.waited_s += 4.0
            return replace(super().outcome_of(config, settings), wall_s=4.0)

    made = recommender(tmp_path, Timed(noise=0.01), sampler="cost-model", num_trials=None, budget_s=100.0)
    result = answer(made)
    told = [effect for effect in result.effects if effect.speed_ratio_ci is not None]
    assert len(result.effects) >= 2 and len(told) >= 2


class OnlyNoise(Compared):
    """What the techniques do is within the noise; a larger batch gains."""

    def samples_per_s(self, config):
        return 100 * config.batch_size / (config.batch_size + 4) * (1 + 0.002 * len(config.differences(PLAIN)))

    def peak_bytes(self, config):
        return 200 * 2**20 + config.batch_size


PLAIN = techniques.complete({"batch_size": 4}, global_batch=96)


def test_where_memory_is_not_short_the_simpler_config_plays_and_wins_the_tie(tmp_path):
    made = recommender(tmp_path, OnlyNoise(noise=0.01), num_trials=None)
    tried = ({"checkpoint_segments": 2, "amp": "bf16"}, {"checkpoint_segments": 1, "amp": "bf16"}, {"amp": "bf16"}, {})
    configs = [made.history.space.complete({"batch_size": 24, **changed}) for changed in tried]
    made.proposer = lambda: Listed(list(configs))
    made.undo_changes = made.untried = lambda: Listed(())
    result = answer(made)
    assert result.config == configs[-1].as_dict() and result.verdict == "faster"


def test_where_one_config_alone_can_play_it_is_the_simplest_of_those_that_are_as_good():
    merits = {"three": 100.0, "two": 99.0, "one": 95.0}
    num_changes = {"three": 3, "two": 2, "one": 1}.__getitem__
    assert with_the_simplest(merits, 1, num_changes) == ["two"]
    assert with_the_simplest(merits, 2, num_changes) == ["three", "one"]
    assert with_the_simplest(merits, 3, num_changes) == ["three", "one", "two"]


@pytest.mark.parametrize(
    ("speeds", "order"),
    [((100.0, 90.0, 130.0), [2, 0]), ((100.0, 95.0, 104.0), [0, 1, 2]), ((100.0, 99.0, None), [0, 1])],
)
def test_a_config_that_only_just_fits_plays_before_the_safe_ones_only_where_it_is_much_faster(speeds, order):
    """The first two surely fit; the third takes more than that, and fits as well."""
    objective = OBJECTIVES["throughput"](memory_limit_bytes=LIMIT_BYTES, headroom=0.0)
    sizes = [SURE_TO_FIT * 0.9 * LIMIT_BYTES] * 2 + [(1 + SURE_TO_FIT) / 2 * LIMIT_BYTES]
    configs = [techniques.complete({"batch_size": size}) for size in (1, 2, 4)]
    ran = {
        config: Outcome(kind=Kind.OK, measurement=measurement(config, speed, int(peak_bytes)))
        for config, speed, peak_bytes in zip(configs, speeds, sizes, strict=True)
        if speed is not None
    }
    ranked = dict(sorted(ran.items(), key=lambda item: -objective.merit(item[1])))
    assert near_the_best(ranked, objective) == [configs[number] for number in order]


@pytest.mark.parametrize(
    ("legal", "dataset_size", "compared"), [(1, None, 1), (3, None, 3), (2, 3, 3), (2, 100, 4), (8, 100, 8)]
)
def test_a_comparison_takes_as_many_samples_as_are_legal_and_there(tmp_path, legal, dataset_size, compared):
    class Sized(Compared):
        def check_of(self, config, settings, batch_size):
            sizes.append(batch_size)
            return passed_check()

    sizes = []
    facts = replace(FOUND.facts, dataset_size=dataset_size)
    made = recommender(tmp_path, Sized(), inspection=replace(FOUND, step_samples=legal, facts=facts))
    assert Clearance(made).clear(made.history.space.complete({"optimizer_impl": "fused"}))
    assert sizes == [compared]
