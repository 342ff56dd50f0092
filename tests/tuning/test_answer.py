"""From a finished loop to a recommendation: what is said of a play-off that was cut short, of failures, of checks."""

import io
import json
import time
from dataclasses import replace

import pytest
from rich.console import Console

from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Check, Result
from autotune.report.text import render_result
from autotune.study.reading import load_study
from autotune.tuning.answer import Interrupted, NothingFeasible, Recommender
from autotune.tuning.events import Listener
from autotune.tuning.loop import PLAY_OFF_INTERVAL
from tests.closed_form import LIMIT_BYTES, ClosedFormProber, inspection, make_loop

FOUND = inspection(facts={"name": "closed", "source_hash": "abc", "warnings": [], "has_batchnorm": False})
OOM = Outcome(kind=Kind.OOM, cause="no memory", wall_s=0.1)
UNTRUE = ("did not run", "does not run", "Keep what you have", "more than the memory limit")


class Staged(ClosedFormProber):
    """Knows which of its probes are the play-off's; `in_play_off` may give them another outcome."""

    def __post_init__(self):
        super().__post_init__()
        self.played = []
        self.checked = []

    def run(self, config, settings):
        outcome = super().run(config, settings)
        if settings.interval != PLAY_OFF_INTERVAL:
            return outcome
        self.played.append(config)
        return self.in_play_off(config, settings, outcome)

    def in_play_off(self, config, settings, outcome):
        return outcome

    def check(self, config, settings, batch_size):
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


def recommender(folder, prober, **changes):
    loop = make_loop(folder, prober, **{"inspection": FOUND, "num_trials": 5, "sampler": "random", **changes})
    return Recommender(loop, prober, FOUND, Listener(), [], loop.interrupted)


def text_of(result):
    stream = io.StringIO()
    render_result(result, Console(file=stream, width=120))
    return " ".join(stream.getvalue().split())


def assert_unconfirmed(result, loop):
    """The search's best, held against the search's own probe of the baseline."""
    assert not result.confirmed and not result.finalists
    assert result.config == loop.best[0].as_dict()
    assert result.baseline is not None and result.speedup > 1 and result.verdict == "faster"
    said = text_of(result) + " ".join(result.warnings)
    assert not [words for words in UNTRUE if words in said]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_play_off_interrupted_in_its_first_round_is_not_held(tmp_path, seed):
    """Whoever was first in the shuffled round: the baseline, or another."""
    prober = Staged()
    made = recommender(tmp_path, prober, seed=seed, interrupted=lambda: bool(prober.played))
    with pytest.raises(Interrupted) as raised:
        made.answer()
    assert len(prober.played) == 1
    assert_unconfirmed(raised.value.result, made.loop)


def test_a_play_off_interrupted_later_confirms_what_it_found(tmp_path):
    prober = Staged()
    made = recommender(tmp_path, prober, interrupted=lambda: len(prober.played) >= 5)
    with pytest.raises(Interrupted) as raised:
        made.answer()
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
    prober = Shrinking()
    made = recommender(tmp_path, prober, sampler="cost-model", num_trials=None)
    result = made.answer()
    assert result.confirmed and made.loop.failed_again
    assert result.config not in [config.as_dict() for config in prober.before]


def test_a_resumed_search_knows_what_no_longer_fitted_in_a_play_off(tmp_path):
    first = Shrinking()
    with pytest.raises(NothingFeasible):
        recommender(tmp_path, first, sampler="cost-model").answer()
    second = Staged()
    recommender(tmp_path, second, sampler="cost-model", num_trials=None).answer()
    assert set(first.played) and not set(first.played) & set(second.played)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_play_off_that_the_time_does_not_suffice_for_is_not_held(tmp_path, seed):
    class Slow(Staged):
        def in_play_off(self, config, settings, outcome):
            made.loop.started -= 2000
            return outcome

    made = recommender(tmp_path, prober := Slow(), seed=seed)
    result = made.answer()
    assert len(prober.played) == 1
    assert_unconfirmed(result, made.loop)
    assert any("--budget" in warning for warning in result.warnings)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_baseline_that_is_killed_for_want_of_time_is_not_said_to_fail(tmp_path, seed):
    class Endless(Staged):
        """Late in the budget, a run of the baseline takes all the time that is left."""

        def in_play_off(self, config, settings, outcome):
            if config != made.loop.space.baseline:
                return outcome
            made.loop.started -= settings.timeout_s
            return Outcome(kind=Kind.TIMEOUT, cause="killed", wall_s=settings.timeout_s)

    made = recommender(tmp_path, Endless(), seed=seed)
    explore = made.loop.explore

    def explore_for_long():
        explore()
        made.loop.started -= made.loop.left_s - 5

    made.loop.explore = explore_for_long
    assert_unconfirmed(made.answer(), made.loop)
    study = load_study(tmp_path / "closed.db")
    assert study.num_lost == 1 and all(probe.outcome.ok for probe in study.probes if probe.stage == "play-off")


def test_a_baseline_that_fails_in_the_play_off_is_reported_with_that_failure(tmp_path):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            return OOM if config == made.loop.space.baseline else outcome

    made = recommender(tmp_path, Failing())
    result = made.answer()
    assert result.confirmed and result.baseline is None and result.speedup is None
    assert any("baseline did not run: in the play-off, oom: no memory" in warning for warning in result.warnings)
    assert "the baseline did not" in text_of(result)
    assert made.loop.space.baseline.as_dict() not in [measured.config for measured in result.front]


def test_a_baseline_beyond_the_memory_is_reported_as_such(tmp_path):
    class Large(Staged):
        def peak_bytes(self, config):
            return int(0.97 * LIMIT_BYTES) if config == made.loop.space.baseline else super().peak_bytes(config)

    made = recommender(tmp_path, Large())
    result = made.answer()
    assert result.confirmed and result.baseline is None
    assert any("it needs more than the memory limit less headroom" in warning for warning in result.warnings)


def test_what_failed_in_a_first_round_that_was_cut_short_is_not_the_answer(tmp_path):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            return OOM

    prober = Failing()
    made = recommender(tmp_path, prober, seed=1, interrupted=lambda: len(prober.played) >= 2)
    with pytest.raises(Interrupted) as raised:
        made.answer()
    result = raised.value.result
    failed = [config.as_dict() for config in prober.played]
    assert result.config not in failed
    assert not [measured for measured in result.front if measured.config in failed]


def test_when_everything_fails_in_the_play_off_there_is_no_answer(tmp_path):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            return OOM

    with pytest.raises(NothingFeasible, match=r"oom: no memory.*--headroom 15%.*--study NAME"):
        recommender(tmp_path, Failing()).answer()
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
        def run(self, config, settings):
            outcome = super().run(config, settings)
            return outcome if config == made.loop.space.baseline else OOM

        def in_play_off(self, config, settings, outcome):
            return ends or replace(outcome, measurement=replace(outcome.measurement, peak_bytes=LIMIT_BYTES))

    made = recommender(tmp_path, Alone())
    with pytest.raises(NothingFeasible, match=cause):
        made.answer()
    assert not [text for text in made.warnings if "--budget" in text]
    assert load_study(tmp_path / "closed.db").result is None


def test_a_baseline_that_failed_in_a_round_that_was_cut_short_is_said_to_have_failed(tmp_path):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            return OOM if config == made.loop.space.baseline else outcome

    prober = Failing()
    made = recommender(tmp_path, prober, interrupted=lambda: bool(made.loop.failed_again) or len(prober.played) > 2)
    with pytest.raises(Interrupted) as raised:
        made.answer()
    assert raised.value.result.baseline is None
    assert any("in the play-off, oom: no memory" in text for text in raised.value.result.warnings)


@pytest.mark.parametrize("failing_round", [0, 1])
@pytest.mark.parametrize("beyond", [False, True])
def test_what_fails_in_the_play_off_is_shown_as_dropped_and_is_not_in_the_front(tmp_path, failing_round, beyond):
    class Failing(Staged):
        def in_play_off(self, config, settings, outcome):
            if config != self.best or self.played.count(config) - 1 != failing_round:
                return outcome
            return replace(outcome, measurement=replace(outcome.measurement, peak_bytes=10**12)) if beyond else OOM

    prober = Failing()
    made = recommender(tmp_path, prober)
    run_play_off = made.loop.run_play_off

    def play(admit):
        prober.best = made.loop.best[0]
        return run_play_off(admit)

    made.loop.run_play_off = play
    result = made.answer()
    reason = "more than the memory limit less headroom" if beyond else "oom: no memory"
    failed = prober.best.as_dict()
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

    def check(self, config, settings, batch_size):
        self.checked.append(config)
        return self.outcome if config["amp"] == "off" else passed_check()


def test_a_technique_that_could_not_be_compared_is_named_and_compared_when_the_search_goes_on(tmp_path):
    fused = {"optimizer_impl": "fused"}
    first = recommender(tmp_path, Checked(), fix=fused)
    (warning,) = [text for text in first.answer().warnings if "not compared" in text]
    assert all(part in warning for part in ("optimizer_impl=fused", "killed after 10 s", "--budget"))
    assert not first.loop.store.attributes().get("exactness")
    assert sum(config["amp"] == "off" for config in first.loop.prober.checked) == 1  # not over and over

    second = recommender(tmp_path, prober := Staged(), fix=fused)
    assert not [text for text in second.answer().warnings if "not compared" in text]
    assert [config for config in prober.checked if config["amp"] == "off" and config["optimizer_impl"] == "fused"]
    assert second.loop.store.attributes()["exactness"]["optimizer_impl=fused"] == ""


def test_a_comparison_that_runs_out_of_memory_asks_for_memory(tmp_path):
    class Large(Checked):
        outcome = OOM

    warnings = recommender(tmp_path, Large(), fix={"optimizer_impl": "fused"}).answer().warnings
    assert any(
        "optimizer_impl=fused" in text and "oom: no memory" in text and "--memory-limit" in text for text in warnings
    )


def test_a_technique_for_which_no_time_is_left_is_named(tmp_path):
    made = recommender(tmp_path, prober := Staged(), fix={"optimizer_impl": "fused"})
    undo_changes = made.loop.undo_changes

    def undo_for_long():
        undo_changes()
        made.loop.started = time.monotonic() - made.loop.budget_s - 1

    made.loop.undo_changes = undo_for_long
    result = made.answer()
    assert not [config for config in prober.checked if config["amp"] == "off"]
    assert any("optimizer_impl=fused" in text and "budget was spent" in text for text in result.warnings)
    assert not made.loop.store.attributes().get("exactness")


def test_a_technique_that_is_not_exact_is_left_out_now_and_when_the_search_goes_on(tmp_path):
    class Inexact(Checked):
        outcome = replace(passed_check(), passed=False, reason="the gradients differ by 3")

    for _ in range(2):
        result = recommender(tmp_path, Inexact()).answer()
        assert result.config["optimizer_impl"] == "default" and result.config["checkpoint_segments"] == 0
        assert any("is left out: the gradients differ by 3" in text for text in result.warnings)


def play_off_in_which_finalists_fail(folder, prober, substitute):
    """A search that found only configs of full precision so far; `substitute` comes in for whoever fails."""
    made = recommender(folder, prober, num_trials=None)
    loop = made.loop
    configs = [loop.space.complete({"batch_size": size, "amp": "bf16"}) for size in (12, 8)]
    loop.explore = lambda: [loop._probe_once(config, "search", "") for config in (*configs, substitute)]
    loop.undo_changes = lambda: None
    loop.finalists = lambda: configs
    return made, configs


class Substituted(Staged):
    """Whoever is in `failing` runs out of memory in the play-off; what is exact is as `exact` says."""

    failing = ()
    exact = passed_check()

    def in_play_off(self, config, settings, outcome):
        return OOM if config in self.failing else outcome

    def check(self, config, settings, batch_size):
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
def test_who_comes_in_for_a_finalist_that_failed_is_compared_first(tmp_path, exact, comes_in):
    prober = Substituted()
    prober.exact = exact
    space = make_loop(tmp_path, prober).space
    substitute = space.complete({"batch_size": 8, "amp": "bf16", "optimizer_impl": "fused"})
    made, finalists = play_off_in_which_finalists_fail(tmp_path, prober, substitute)
    prober.failing = finalists
    result = made.answer()
    assert (substitute in prober.played) == comes_in
    assert result.config == (substitute if comes_in else space.baseline).as_dict()
    left_out = [text for text in result.warnings if "optimizer_impl=fused is left out" in text]
    assert bool(left_out) == (getattr(exact, "passed", None) is False)


def test_nobody_is_compared_for_the_play_off_while_no_finalist_fails(tmp_path):
    prober = Substituted()
    space = make_loop(tmp_path, prober).space
    substitute = space.complete({"batch_size": 4, "optimizer_impl": "fused"})
    made, _ = play_off_in_which_finalists_fail(tmp_path, prober, substitute)
    made.answer()
    assert len(prober.checked) == 1  # the answer


def test_a_search_that_goes_on_and_is_interrupted_does_not_replace_a_confirmed_answer(tmp_path):
    confirmed = recommender(tmp_path, Staged()).answer()
    prober = Staged()
    with pytest.raises(Interrupted) as raised:
        recommender(tmp_path, prober, num_trials=9, interrupted=lambda: len(prober.configs) >= 2).answer()
    assert not raised.value.result.confirmed
    assert any("keeps its earlier answer" in text for text in raised.value.result.warnings)
    study = load_study(tmp_path / "closed.db")
    assert study.result == confirmed and len(study.probes) > confirmed.probes
    again = recommender(tmp_path, Staged()).answer()
    assert load_study(tmp_path / "closed.db").result == again


def test_an_unconfirmed_answer_replaces_one_that_is_not_confirmed_either(tmp_path):
    for num in (2, 4):
        prober = Staged()
        with pytest.raises(Interrupted) as raised:
            recommender(tmp_path, prober, interrupted=lambda p=prober, n=num: len(p.configs) >= n).answer()
        assert load_study(tmp_path / "closed.db").result == raised.value.result


def test_probes_outcomes_and_training_seconds_are_those_of_the_whole_study(tmp_path):
    for _ in range(2):
        result = recommender(tmp_path, Staged()).answer()
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

    result = recommender(tmp_path, prober := Faster(), num_trials=25).answer()
    found = {effect.technique: effect for effect in result.effects if effect.num_pairs}
    assert result.samples_per_s > 1.5 * prober.samples_per_s(prober.played[0])
    assert found["amp"].speed_ratio == pytest.approx(1.4)
