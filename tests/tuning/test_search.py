"""From a finished search to a recommendation: what is said of a play-off that was cut short, of failures, of checks."""

import json
from dataclasses import replace

import pytest

from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Check, Result
from autotune.records.trial import Proposal
from autotune.report.answer import answer_sections
from autotune.report.terminal import as_text
from autotune.study.reading import load_study
from autotune.tuning.confirm import PLAY_OFF_INTERVAL, confirm
from autotune.tuning.explore import explore
from autotune.tuning.recommend import Interrupted, NothingFeasible
from autotune.tuning.search import answer
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection, make_search

FOUND = inspection(facts={"name": "closed", "source_hash": "abc", "warnings": [], "has_batchnorm": False})
OOM = Outcome(kind=Kind.OOM, cause="no memory", wall_s=0.1)
UNTRUE = ("did not run", "does not run", "Keep what you have", "more than the memory limit")


class Staged(ClosedFormRunner):
    """Knows which of its probes are the play-off's; `in_play_off` may give them another outcome."""

    def __post_init__(self):
        super().__post_init__()
        self.played = []
        self.checked = []

    def outcome_of(self, config, settings):
        outcome = super().outcome_of(config, settings)
        if settings.interval != PLAY_OFF_INTERVAL:
            return outcome
        self.played.append(config)
        return self.in_play_off(config, settings, outcome)

    def in_play_off(self, config, settings, outcome):
        return outcome

    def check_of(self, config, settings, batch_size):
        self.checked.append(config)
        return passed_check()


def passed_check():
    return Check(
        technique="config",
        choice="",
        exact=True,
        loss_error=0.0,
        gradient_error=0.0,
        gradient_cosine=1.0,
        buffer_error=0.0,
        names_equal=True,
        noise=0.0,
        passed=True,
    )


def recommender(folder, runner, **changes):
    return make_search(folder, runner, **{"inspection": FOUND, "num_trials": 5, "sampler": "random", **changes})


class Listed:
    """Proposes given configs."""

    def __init__(self, configs, then=lambda: None):
        self.configs = list(configs)
        self.then = then

    def propose(self, history):
        if self.configs:
            return Proposal(config=self.configs.pop(0))
        return self.then()


def text_of(result):

    return " ".join(as_text(answer_sections(result), width=120).split())


def assert_unconfirmed(result, search):
    """The search's best, held against the search's own probe of the baseline."""
    assert not result.confirmed and not result.finalists
    assert result.config == search.history.best[0].as_dict()
    assert result.baseline is not None and result.speedup > 1 and result.verdict == "faster"
    said = text_of(result) + " ".join(result.warnings)
    assert not [words for words in UNTRUE if words in said]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_play_off_interrupted_in_its_first_round_is_not_held(tmp_path, seed):
    """Whoever was first in the shuffled round: the baseline, or another."""
    runner = Staged()
    made = recommender(tmp_path, runner, seed=seed, interrupted=lambda: bool(runner.played))
    with pytest.raises(Interrupted) as raised:
        answer(made)
    assert len(runner.played) == 1
    assert_unconfirmed(raised.value.result, made)


def test_a_play_off_interrupted_later_confirms_what_it_found(tmp_path):
    runner = Staged()
    made = recommender(tmp_path, runner, interrupted=lambda: len(runner.played) >= 5)
    with pytest.raises(Interrupted) as raised:
        answer(made)
    assert raised.value.result.confirmed and raised.value.result.baseline is not None


class Shrinking(Staged):
    """By the first play-off something else takes memory: what was measured before no longer fits."""

    def __post_init__(self):
        super().__post_init__()
        self.before = None

    def in_play_off(self, config, settings, outcome):
        self.before = self.before or set(self.configs)
        return OOM if config in self.before else outcome


def test_where_all_of_the_best_fail_in_the_play_off_the_search_goes_on(tmp_path):
    runner = Shrinking()
    made = recommender(tmp_path, runner, sampler="cost-model", num_trials=None)
    result = answer(made)
    assert result.confirmed and made.history.failed_again
    assert result.config not in [config.as_dict() for config in runner.before]


def test_a_resumed_search_knows_what_no_longer_fitted_in_a_play_off(tmp_path):
    first = Shrinking()
    with pytest.raises(NothingFeasible):
        answer(recommender(tmp_path, first, sampler="cost-model"))
    second = Staged()
    answer(recommender(tmp_path, second, sampler="cost-model", num_trials=None))
    assert set(first.played) and not set(first.played) & set(second.played)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_play_off_that_the_time_does_not_suffice_for_is_not_held(tmp_path, seed):
    class Slow(Staged):
        def in_play_off(self, config, settings, outcome):
            self.waited_s += 2000
            return outcome

    made = recommender(tmp_path, runner := Slow(), seed=seed)
    result = answer(made)
    assert len(runner.played) == 1
    assert_unconfirmed(result, made)
    assert any("--budget" in warning for warning in result.warnings)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_baseline_that_is_killed_for_want_of_time_is_not_said_to_fail(tmp_path, monkeypatch, seed):
    class Endless(Staged):
        """Late in the budget, a run of the baseline takes all the time that is left."""

        def in_play_off(self, config, settings, outcome):
            if config != made.history.space.baseline:
                return outcome
            self.waited_s += settings.timeout_s
            return Outcome(kind=Kind.TIMEOUT, cause="killed", wall_s=settings.timeout_s)

    made = recommender(tmp_path, runner := Endless(), seed=seed)

    def explore_for_long(search, proposer):
        explore(search, proposer)
        runner.waited_s += made.budget.left_s - 5

    monkeypatch.setattr("autotune.tuning.search.explore", explore_for_long)
    assert_unconfirmed(answer(made), made)
    study = load_study(tmp_path / "closed.db")
    assert study.num_lost == 1 and all(probe.outcome.ok for probe in study.probes if probe.stage == "play-off")


def test_a_baseline_that_fails_in_the_play_off_is_reported_with_that_failure(tmp_path):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            return OOM if config == made.history.space.baseline else outcome

    made = recommender(tmp_path, Failing())
    result = answer(made)
    assert result.confirmed and result.baseline is None and result.speedup is None
    assert any("baseline did not run: in the play-off, oom: no memory" in warning for warning in result.warnings)
    assert "the baseline did not" in text_of(result)
    assert made.history.space.baseline.as_dict() not in [measured.config for measured in result.front]


def test_a_baseline_beyond_the_memory_is_reported_as_such(tmp_path):
    class Large(Staged):
        def peak_bytes(self, config):
            return int(0.97 * LIMIT_BYTES) if config == made.history.space.baseline else super().peak_bytes(config)

    made = recommender(tmp_path, Large())
    result = answer(made)
    assert result.confirmed and result.baseline is None
    assert any("it needs more than the memory limit less headroom" in warning for warning in result.warnings)


def test_what_failed_in_a_first_round_that_was_cut_short_is_not_the_answer(tmp_path):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            return OOM

    runner = Failing()
    made = recommender(tmp_path, runner, seed=1, interrupted=lambda: len(runner.played) >= 2)
    with pytest.raises(Interrupted) as raised:
        answer(made)
    result = raised.value.result
    failed = [config.as_dict() for config in runner.played]
    assert result.config not in failed
    assert not [measured for measured in result.front if measured.config in failed]


def test_when_everything_fails_in_the_play_off_there_is_no_answer(tmp_path):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            return OOM

    with pytest.raises(NothingFeasible, match=r"oom: no memory.*--headroom 15%.*--study NAME"):
        answer(recommender(tmp_path, Failing()))
    assert load_study(tmp_path / "closed.db").result is None


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        (OOM, "the baseline: oom: no memory.*--headroom"),
        (Outcome(kind=Kind.CRASHED, cause="SIGSEGV", wall_s=0.1), "the baseline: crashed: SIGSEGV.*autotune probe"),
        (None, "the baseline: it needs more than the memory limit less headroom.*--headroom"),
    ],
)
def test_a_baseline_that_alone_ran_and_then_fails_is_no_answer(tmp_path, ends, cause):
    class Alone(Staged):
        def outcome_of(self, config, settings):
            outcome = super().outcome_of(config, settings)
            return outcome if config == made.history.space.baseline else OOM

        def in_play_off(self, config, settings, outcome):
            return ends or replace(outcome, measurement=replace(outcome.measurement, peak_bytes=LIMIT_BYTES))

    made = recommender(tmp_path, Alone())
    with pytest.raises(NothingFeasible, match=cause):
        answer(made)
    assert not [text for text in made.warnings if "--budget" in text]
    assert load_study(tmp_path / "closed.db").result is None


def test_a_baseline_that_failed_in_a_round_that_was_cut_short_is_said_to_have_failed(tmp_path):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            return OOM if config == made.history.space.baseline else outcome

    runner = Failing()
    made = recommender(tmp_path, runner, interrupted=lambda: bool(made.history.failed_again) or len(runner.played) > 2)
    with pytest.raises(Interrupted) as raised:
        answer(made)
    assert raised.value.result.baseline is None
    assert any("in the play-off, oom: no memory" in text for text in raised.value.result.warnings)


@pytest.mark.parametrize("failing_round", [0, 1])
@pytest.mark.parametrize("beyond", [False, True])
def test_what_fails_in_the_play_off_is_shown_as_dropped_and_is_not_in_the_front(
    tmp_path, monkeypatch, failing_round, beyond
):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            if config != self.best or self.played.count(config) - 1 != failing_round:
                return outcome
            return replace(outcome, measurement=replace(outcome.measurement, peak_bytes=10**12)) if beyond else OOM

    runner = Failing()
    made = recommender(tmp_path, runner)

    def play(search, admit):
        runner.best = search.history.best[0]
        return confirm(search, admit)

    monkeypatch.setattr("autotune.tuning.search.confirm", play)
    result = answer(made)
    reason = "more than the memory limit less headroom" if beyond else "oom: no memory"
    failed = runner.best.as_dict()
    assert result.config != failed
    assert failed not in [measured.config for measured in result.front]
    assert result.config in [measured.config for measured in result.front]

    document = json.loads(json.dumps(result.to_dict()))
    (dropped,) = [finalist for finalist in document["finalists"] if finalist.get("dropped")]
    assert dropped["config"] == failed and reason in dropped["dropped"]
    assert dropped["num_processes"] == failing_round + beyond
    assert Result.from_dict(document) == Result.from_dict(result.to_dict()) == result
    assert f"dropped {'-' if not dropped['num_processes'] else ''}" in text_of(result) and reason in text_of(result)

    study = load_study(tmp_path / "closed.db")
    assert study.result == result
    assert [measured.config for measured in study.front_configs()] == [measured.config for measured in result.front]


class Checked(Staged):
    """Every comparison with plain fp32 ends as `outcome` says."""

    outcome = Outcome(kind=Kind.TIMEOUT, cause="killed after 10 s, during checks")

    def check_of(self, config, settings, batch_size):
        self.checked.append(config)
        return self.outcome if config["amp"] == "off" else passed_check()


def test_a_technique_that_could_not_be_compared_is_named_and_compared_when_the_search_goes_on(tmp_path):
    fused = {"optimizer_impl": "fused"}
    first = recommender(tmp_path, Checked(), fix=fused)
    (warning,) = [text for text in answer(first).warnings if "not compared" in text]
    assert all(part in warning for part in ("optimizer_impl=fused", "killed after 10 s", "--budget"))
    assert not first.store.attributes().get("exactness")
    assert sum(config["amp"] == "off" for config in first.runner.checked) == 1  # not over and over

    second = recommender(tmp_path, runner := Staged(), fix=fused)
    assert not [text for text in answer(second).warnings if "not compared" in text]
    assert [config for config in runner.checked if config["amp"] == "off" and config["optimizer_impl"] == "fused"]
    assert second.store.attributes()["exactness"]["optimizer_impl=fused"] == ""


def test_a_comparison_that_runs_out_of_memory_asks_for_memory(tmp_path):
    class Large(Checked):
        outcome = OOM

    warnings = answer(recommender(tmp_path, Large(), fix={"optimizer_impl": "fused"})).warnings
    assert any(
        "optimizer_impl=fused" in text and "oom: no memory" in text and "--memory-limit" in text for text in warnings
    )


def test_a_technique_for_which_no_time_is_left_is_named(tmp_path, monkeypatch):
    made = recommender(tmp_path, runner := Staged(), fix={"optimizer_impl": "fused"})

    def explore_for_long(search, proposer):
        explore(search, proposer)
        runner.waited_s += made.budget.budget_s + 1

    monkeypatch.setattr("autotune.tuning.search.explore", explore_for_long)
    result = answer(made)
    assert not [config for config in runner.checked if config["amp"] == "off"]
    assert any("optimizer_impl=fused" in text and "budget was spent" in text for text in result.warnings)
    assert not made.store.attributes().get("exactness")


def test_a_technique_that_is_not_exact_is_left_out_now_and_when_the_search_goes_on(tmp_path):
    class Inexact(Checked):
        outcome = replace(passed_check(), passed=False, reason="the gradients differ by 3")

    for _ in range(2):
        result = answer(recommender(tmp_path, Inexact()))
        assert result.config["optimizer_impl"] == "default" and result.config["checkpoint_segments"] == 0
        assert any("is left out: the gradients differ by 3" in text for text in result.warnings)


def play_off_in_which_finalists_fail(folder, runner, substitute, monkeypatch):
    """A search that found only configs of full precision so far; `substitute` comes in for whoever fails."""
    made = recommender(folder, runner, num_trials=None)
    configs = [made.history.space.complete({"batch_size": size, "amp": "bf16"}) for size in (12, 8)]
    made.proposer = lambda: Listed((*configs, substitute))
    made.undo_changes = lambda: Listed(())
    for module in ("confirm", "exactness"):
        monkeypatch.setattr(f"autotune.tuning.{module}.finalists_of", lambda search: configs)
    return made, configs


class Substituted(Staged):
    """Whoever is in `failing` runs out of memory in the play-off; what is exact is as `exact` says."""

    failing = ()
    exact = passed_check()

    def in_play_off(self, config, settings, outcome):
        return OOM if config in self.failing else outcome

    def check_of(self, config, settings, batch_size):
        self.checked.append(config)
        return self.exact if config["amp"] == "off" else passed_check()


@pytest.mark.parametrize(
    ("exact", "comes_in"),
    [
        (passed_check(), True),
        (replace(passed_check(), passed=False, reason="the gradients differ by 3"), False),
        (Outcome(kind=Kind.TIMEOUT, cause="killed after 10 s"), False),
    ],
)
def test_who_comes_in_for_a_finalist_that_failed_is_compared_first(tmp_path, monkeypatch, exact, comes_in):
    runner = Substituted()
    runner.exact = exact
    space = make_search(tmp_path, runner).history.space
    substitute = space.complete({"batch_size": 8, "amp": "bf16", "optimizer_impl": "fused"})
    made, finalists = play_off_in_which_finalists_fail(tmp_path, runner, substitute, monkeypatch)
    runner.failing = finalists
    result = answer(made)
    assert (substitute in runner.played) == comes_in
    assert result.config == (substitute if comes_in else space.baseline).as_dict()
    left_out = [text for text in result.warnings if "optimizer_impl=fused is left out" in text]
    assert bool(left_out) == (getattr(exact, "passed", None) is False)


def test_nobody_is_compared_for_the_play_off_while_no_finalist_fails(tmp_path, monkeypatch):
    runner = Substituted()
    space = make_search(tmp_path, runner).history.space
    substitute = space.complete({"batch_size": 4, "optimizer_impl": "fused"})
    made, _ = play_off_in_which_finalists_fail(tmp_path, runner, substitute, monkeypatch)
    answer(made)
    assert len(runner.checked) == 1  # the answer


def test_a_search_that_goes_on_and_is_interrupted_does_not_replace_a_confirmed_answer(tmp_path):
    confirmed = answer(recommender(tmp_path, Staged()))
    runner = Staged()
    with pytest.raises(Interrupted) as raised:
        answer(recommender(tmp_path, runner, num_trials=9, interrupted=lambda: len(runner.configs) >= 2))
    assert not raised.value.result.confirmed
    assert any("keeps its earlier answer" in text for text in raised.value.result.warnings)
    study = load_study(tmp_path / "closed.db")
    assert study.result == confirmed and len(study.probes) > confirmed.probes
    again = answer(recommender(tmp_path, Staged()))
    assert load_study(tmp_path / "closed.db").result == again


def test_an_unconfirmed_answer_replaces_one_that_is_not_confirmed_either(tmp_path):
    for num in (2, 4):
        runner = Staged()
        with pytest.raises(Interrupted) as raised:
            answer(recommender(tmp_path, runner, interrupted=lambda p=runner, n=num: len(p.configs) >= n))
        assert load_study(tmp_path / "closed.db").result == raised.value.result


def test_probes_outcomes_and_training_seconds_are_those_of_the_whole_study(tmp_path):
    for _ in range(2):
        result = answer(recommender(tmp_path, Staged()))
        probes = load_study(tmp_path / "closed.db").probes
        assert result.probes == len(probes) == sum(result.outcomes.values())
        trained = [probe.outcome.measurement.train_s for probe in probes if probe.outcome.measurement]
        assert result.train_s == pytest.approx(sum(trained))


def test_what_a_technique_did_is_told_from_the_searchs_probes_alone(tmp_path):
    class Faster(Staged):
        """By the time of the play-off the machine is twice as fast."""

        def in_play_off(self, config, settings, outcome):
            speed = 2 * outcome.measurement.samples_per_s
            return replace(outcome, measurement=replace(outcome.measurement, samples_per_s=speed))

    result = answer(recommender(tmp_path, runner := Faster(), num_trials=25))
    found = {effect.technique: effect for effect in result.effects if effect.num_pairs}
    assert result.samples_per_s > 1.5 * runner.samples_per_s(runner.played[0])
    assert found["amp"].speed_ratio == pytest.approx(1.4)
