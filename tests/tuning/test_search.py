"""From a finished search to a recommendation: what is said of a play-off that was cut short, of failures, of checks."""

import json
import re
from dataclasses import replace

import pytest

from autotune.records.check import Check
from autotune.records.config import ShapeGrowth
from autotune.records.inspection import BatchSupport, Support
from autotune.records.outcome import Kept, Kind, Outcome
from autotune.records.result import Result
from autotune.records.study import Proposal
from autotune.report.answer import answer_sections
from autotune.report.terminal import as_text
from autotune.runners.runner import Stated
from autotune.study.reading import load_study
from autotune.techniques import find_techniques
from autotune.tuning import playoff
from autotune.tuning.confirm import PLAY_OFF_INTERVAL, SURE_TO_FIT, confirm
from autotune.tuning.entrant import Entrant, Standing
from autotune.tuning.explore import explore
from autotune.tuning.recommend import Interrupted, NothingFeasible, gain_of, verdict_of
from autotune.tuning.search import answer
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection, make_search, measurement

techniques = find_techniques()

FOUND = inspection()
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

    def left(self, history):
        return []


def text_of(result):

    return " ".join(as_text(answer_sections(result, find_techniques()), width=120).split())


def assert_unconfirmed(result, search):
    """The search's best, held against the search's own probe of the baseline."""
    assert not result.confirmed and not result.finalists
    assert result.config == search.history.best[0].as_dict()
    assert result.baseline is not None and result.speedup > 1
    assert result.verdict == "undecided" and "no round of the play-off was completed" in result.undecided
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
    assert raised.value.exit_code == 130
    assert_unconfirmed(raised.value.result, made)


def test_a_play_off_interrupted_later_confirms_what_it_found(tmp_path):
    runner = Staged()
    made = recommender(tmp_path, runner, interrupted=lambda: len(runner.played) >= 5)
    with pytest.raises(Interrupted) as raised:
        answer(made)
    found = raised.value.result
    assert found.confirmed and found.baseline is not None
    assert any(
        "interrupted after 2 rounds of the play-off; the same command goes on" in text for text in found.warnings
    )
    assert not any("larger --budget" in text for text in found.warnings)


def test_steps_are_split_by_phase_in_the_search_and_not_once_more_in_the_play_off(tmp_path):
    split = {True: [], False: []}

    class Watched(Staged):
        def outcome_of(self, config, settings):
            split[settings.interval == PLAY_OFF_INTERVAL].append(settings.phases)
            return super().outcome_of(config, settings)

    answer(recommender(tmp_path, Watched()))
    assert split[False] and all(split[False])
    assert split[True] and not any(split[True])


def test_a_round_draws_samples_of_its_own_and_the_same_for_all_who_play_it(tmp_path):
    seeds, lengths = [], set()

    class Watched(Staged):
        def in_play_off(self, config, settings, outcome):
            seeds.append((settings.seed, config))
            lengths.add((settings.seed, settings.max_timed_s, settings.num_samples))
            return outcome

    answer(recommender(tmp_path, Watched()))
    rounds = {seed: {config for other, config in seeds if other == seed} for seed, _ in seeds}
    assert len(rounds) > 1 and all(len(played) > 1 for played in rounds.values())
    assert len(set(seeds)) == len(seeds)
    assert len(lengths) == len(rounds)


@pytest.mark.parametrize("grown_bytes", [0, 2**20])
def test_what_a_play_off_knows_of_memory_is_what_the_search_saw(tmp_path, grown_bytes):
    known = {}

    class Watched(Staged):
        def outcome_of(self, config, settings):
            outcome = super().outcome_of(config, settings)
            if outcome.measurement is None:
                return outcome
            return replace(outcome, measurement=replace(outcome.measurement, long_run_growth_bytes=grown_bytes))

        def in_play_off(self, config, settings, outcome):
            known[config] = settings.known_peak_bytes, settings.known_long_run_peak_bytes
            return outcome

    answer(recommender(tmp_path, runner := Watched()))
    usable = 0.95 * LIMIT_BYTES
    assert known
    for config, told in known.items():
        peak = runner.peak_bytes(config)
        surely_fits = peak + grown_bytes <= SURE_TO_FIT * usable
        assert told == ((peak, (peak + grown_bytes) * bool(grown_bytes)) if surely_fits else (0, 0))


def test_what_shapes_take_is_asked_once_for_each_micro_batch_and_how_many_come_once_for_each_of_its_sizes(tmp_path):
    asked = []
    groups = {}

    def growth_of(config):
        group = config.batch_size, techniques.shapes_group(config)
        return ShapeGrowth(bytes_per_shape=float(1 + groups.setdefault(group, len(groups))))

    class Watched(Staged):
        def outcome_of(self, config, settings):
            asked.append((config, settings.num_shapes, settings.shape_growth))
            outcome = super().outcome_of(config, settings)
            if outcome.measurement is None:
                return outcome
            told = replace(outcome.measurement, num_shapes_expected=7.0, shape_growth=growth_of(config))
            return replace(outcome, measurement=told)

    answer(recommender(tmp_path, Watched()))
    sizes, told = set(), set()
    for config, num_shapes, known in asked:
        growth = growth_of(config)
        assert num_shapes == (7.0 if config.batch_size in sizes else 0.0)
        assert known == (growth if growth in told else None)
        sizes.add(config.batch_size)
        told.add(growth)


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

    def confirm_late(search, *given, **named):
        runner.waited_s += made.left_s - 5
        return confirm(search, *given, **named)

    monkeypatch.setattr("autotune.tuning.search.confirm", confirm_late)
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


@pytest.mark.parametrize("from_process", [0, 1, 3])
def test_a_baseline_that_leaves_too_little_free_runs_and_is_what_the_answer_is_compared_with(tmp_path, from_process):
    class Large(Staged):
        def outcome_of(self, config, settings):
            outcome = super().outcome_of(config, settings)
            if config != made.history.space.baseline:
                return outcome
            processes.append(config)
            peak_bytes = int((0.97 if len(processes) > from_process else 0.9) * LIMIT_BYTES)
            return replace(outcome, measurement=replace(outcome.measurement, peak_bytes=peak_bytes))

    processes = []
    made = recommender(tmp_path, Large())
    result = answer(made)
    baseline = made.history.space.baseline.as_dict()
    assert result.confirmed and result.config != baseline and result.verdict == "faster"
    assert result.baseline.config == baseline and result.speedup > 1 and result.speedup_ci is not None
    assert any("it needs more than the memory limit less headroom" in warning for warning in result.warnings)
    assert baseline not in [measured.config for measured in result.front]
    assert baseline not in [measured.config for measured in load_study(tmp_path / "closed.db").front_configs()]
    assert "does not run" not in text_of(result) and "did not run" not in text_of(result)


def test_an_answer_is_said_to_be_slower_than_a_baseline_that_runs_and_leaves_too_little_free(tmp_path):
    class Fast(Staged):
        def outcome_of(self, config, settings):
            outcome = super().outcome_of(config, settings)
            if config != made.history.space.baseline:
                return outcome
            found = outcome.measurement
            fast = {
                name: 100 * getattr(found, name)
                for name in ("samples_per_s", "samples_per_s_low", "samples_per_s_high")
            }
            return replace(outcome, measurement=replace(found, peak_bytes=int(0.97 * LIMIT_BYTES), **fast))

    made = recommender(tmp_path, Fast())
    result = answer(made)
    assert result.verdict == "slower" and result.speedup < 0.1
    assert result.config != made.history.space.baseline.as_dict()


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
    study = load_study(tmp_path / "closed.db")
    assert study.result is None and "--headroom 15%" in study.facts.no_answer
    assert recommender(tmp_path, Failing()).store.facts.no_answer == ""  # until this one ends


def test_a_search_that_finds_an_answer_takes_back_that_another_of_the_study_found_none(tmp_path):
    made = recommender(tmp_path, Staged())
    made.store.keep(no_answer="everything ran out of memory")  # by one that shares the study
    answer(made)
    study = load_study(tmp_path / "closed.db")
    assert study.result is not None and not study.facts.no_answer


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (None, "the model file sets no BASELINE, so the gain is over plain fp32 at batch size 4"),
        ({"amp": "off"}, "the baseline names no batch_size, so the gain is over its other settings at batch size 4"),
    ],
)
def test_a_baseline_whose_batch_nobody_stated_is_told(tmp_path, stated, said):
    runner = ClosedFormRunner()
    runner.stated = Stated(baseline=stated)
    result = answer(recommender(tmp_path, runner, inspection=replace(FOUND, baseline_given=False)))
    assert any(said in warning for warning in result.warnings)


def test_a_baseline_that_alone_ran_is_not_played_against_itself(tmp_path):
    class Alone(Staged):
        def outcome_of(self, config, settings):
            outcome = super().outcome_of(config, settings)
            return outcome if config == made.history.space.baseline else OOM

    made = recommender(tmp_path, runner := Alone())
    result = answer(made)
    assert not runner.played and not result.confirmed and result.rival is None
    assert result.config == result.baseline.config and result.speedup_ci is None
    assert not [text for text in made.warnings if "--budget" in text]


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

    def play(search, admit, **options):
        runner.best = search.history.best[0]
        return confirm(search, admit, **options)

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


@pytest.mark.parametrize("of_command", [True, False])
def test_what_a_command_was_to_try_and_never_did_is_named_beside_the_gain(tmp_path, of_command):
    class OfCommand(Staged):
        def command(self, config):
            return "python train.py" if of_command else ""

    made = recommender(tmp_path, OfCommand())
    explore(made, Listed([techniques.complete({"batch_size": 48, "amp": "bf16"}, global_batch=96)]))
    result = answer(made)
    said = [text for text in result.warnings if "never run" in text]
    assert result.verdict == "faster" and len(said) == of_command
    assert all("amp=fp16" in text and "amp=bf16" not in text for text in said)


def test_a_choice_that_failed_each_time_is_named_with_its_cause_and_where_to_read_more(tmp_path):
    class Broken(Staged):
        def outcome_of(self, config, settings):
            if config["amp"] == "bf16":
                return Outcome(kind=Kind.ERROR, cause="unrecognized arguments: --bf16", log="studies/gpt.logs/7.log")
            return super().outcome_of(config, settings)

    tried = [{"batch_size": 8, "amp": "bf16"}, {"batch_size": 48}]
    made = recommender(tmp_path, Broken())
    explore(made, Listed(techniques.complete(one, global_batch=96) for one in tried))
    (said,) = [text for text in answer(made).warnings if "unrecognized" in text]
    assert said.startswith("amp=bf16 failed each time it was run") and said.endswith("7.log holds what it printed")


def play_off_in_which_finalists_fail(folder, runner, substitute, monkeypatch):
    """A search that found only configs of full precision so far; `substitute` comes in for whoever fails."""
    made = recommender(folder, runner, num_trials=None)
    configs = [made.history.space.complete({"batch_size": size, "amp": "bf16"}) for size in (12, 8)]
    made.proposer = lambda: Listed((*configs, substitute))
    made.undo_changes = made.untried = lambda: Listed(())
    still_feasible = lambda search: [config for config in configs if config in search.history.feasible]  # noqa: E731
    for module in ("confirm", "clearance"):
        monkeypatch.setattr(f"autotune.tuning.{module}.finalists_of", still_feasible)
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
    assert not [config for config in runner.checked if config["optimizer_impl"] == "fused"]


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


def test_throughput_is_told_in_tokens_where_loss_weight_counts_them(tmp_path):
    found = replace(FOUND, facts=replace(FOUND.facts, tokens_per_sample=256.0))
    result = answer(recommender(tmp_path, Staged(), inspection=found))
    assert result.tokens_per_s == 256.0 * result.samples_per_s
    assert Result.from_dict(result.to_dict()) == result


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


ACCUMULATING = inspection(
    facts=replace(FOUND.facts, has_batchnorm=True),
    baseline=techniques.complete({"batch_size": 4, "accumulation_steps": 24}).as_dict(),
)


def test_what_the_user_runs_is_not_held_against_plain_training(tmp_path):
    """A baseline that accumulates learns otherwise than plain fp32 where there is batch normalisation: the user wants it so."""

    class Slower(Staged):
        def samples_per_s(self, config):
            return 100.0 if config == made.history.space.baseline else 50.0

    made = recommender(tmp_path, runner := Slower(), inspection=ACCUMULATING)
    result = answer(made)
    assert result.config == made.history.space.baseline.as_dict()
    assert not result.checks and made.history.space.baseline not in runner.checked


def test_micro_batches_are_compared_only_where_the_answer_has_more_of_them(tmp_path):
    runner = Staged()
    result = answer(recommender(tmp_path, runner, inspection=ACCUMULATING, fix={"amp": "bf16"}))
    assert result.config["amp"] == "bf16" and result.config["accumulation_steps"] <= 24
    assert runner.checked[-1].accumulation_steps == 1


@pytest.fixture
def six_rounds(monkeypatch):
    """However noisy it is: a play-off that leaves the gain open has fifty."""
    monkeypatch.setattr(playoff, "MAX_ROUNDS", 6)


@pytest.mark.usefixtures("six_rounds")
def test_a_search_that_goes_on_goes_on_with_the_rounds_of_its_play_off(tmp_path):
    """More time narrows the interval that was told; a round that was played is evidence for good."""
    first = answer(recommender(tmp_path, Staged(noise=0.1), num_trials=3))
    second = answer(recommender(tmp_path, Staged(noise=0.1, seed=1), num_trials=1))
    numbers = [probe.round for probe in load_study(tmp_path / "closed.db").probes if probe.stage == "play-off"]
    assert max(numbers) + 1 == len(set(numbers))
    known = {tuple(one.config.items()): one.num_processes for one in (*first.finalists, first.baseline)}
    again = [one for one in (*second.finalists, second.baseline) if tuple(one.config.items()) in known]
    assert all(one.num_processes >= known[tuple(one.config.items())] for one in again) and again


@pytest.mark.usefixtures("six_rounds")
@pytest.mark.parametrize("num_runs", [pytest.param(5, marks=pytest.mark.slow), 6, 7])
def test_a_round_that_was_cut_short_does_not_count_when_the_search_goes_on(tmp_path, num_runs):
    runner = Staged(noise=0.1)
    with pytest.raises(Interrupted):
        answer(recommender(tmp_path, runner, interrupted=lambda: len(runner.played) >= num_runs))
    answer(made := recommender(tmp_path, Staged(noise=0.1, seed=1), num_trials=1))
    whole = made.store.facts.whole_rounds
    played = [trial.round for trial in made.history.trials if trial.round is not None]
    playing = (*made.play_off.entrants, made.play_off.baseline)
    counted = {number for entrant in playing for number in entrant.outcomes}
    assert counted == set(whole) and len(set(played) - counted) <= 1
    if num_runs % 3:
        assert set(played) - counted


def test_a_resumed_search_knows_which_rounds_of_its_play_off_were_disturbed(tmp_path):
    class Disturbed(Staged):
        """What disturbs the baseline makes it ten times as slow."""

        def in_play_off(self, config, settings, outcome):
            found = outcome.measurement
            slow = found.samples_per_s / (10 if config.batch_size == 4 and config["amp"] == "off" else 1)
            return replace(outcome, measurement=replace(found, samples_per_s=slow, disturbances=("others",)))

    fix = {"checkpoint_segments": 0}
    first = answer(recommender(tmp_path, Disturbed(noise=0.02), num_trials=6, fix=fix))
    second = answer(recommender(tmp_path, Staged(noise=0.02), num_trials=1, fix=fix))
    assert first.config == second.config
    assert second.speedup == pytest.approx(first.speedup, rel=0.1)  # the first told what the search had measured


def test_where_others_always_work_a_probe_is_run_again_once_and_no_more(tmp_path):
    class Shared(ClosedFormRunner):
        """Others hold the processor, for another share of the time in each process."""

        def outcome_of(self, config, settings):
            outcome = super().outcome_of(config, settings)
            probed.append(config)
            text = f"others held the processor for {20 + len(probed)}% of the time"
            return replace(outcome, measurement=replace(outcome.measurement, disturbances=(text,)))

    probed = []
    made = make_search(tmp_path, Shared(), budget_s=1000.0)
    choices = [{"batch_size": size} for size in (4, 2, 1)]
    for config in map(made.history.space.complete, choices):
        made.probe(Proposal(config=config))
    assert [config.batch_size for config in probed] == [4, 4, 2, 1]


@pytest.mark.parametrize(("samples_per_s", "num_runs"), [(130.0, 1), (280.0, 2)])
def test_a_disturbed_probe_is_run_again_only_where_it_might_be_the_best_without_that(tmp_path, samples_per_s, num_runs):
    class Shared(ClosedFormRunner):
        def outcome_of(self, config, settings):
            probed.append(config)
            found = measurement(config, 300.0 if config.batch_size == 4 else samples_per_s, LIMIT_BYTES // 2)
            busy = (
                {} if config.batch_size == 4 else {"disturbances": ("others held the processor",), "contention": 0.12}
            )
            return Outcome(kind=Kind.OK, measurement=replace(found, **busy), wall_s=0.1)

    probed = []
    made = make_search(tmp_path, Shared())
    for size in (4, 2):
        made.probe(Proposal(config=made.history.space.complete({"batch_size": size})))
    assert [config.batch_size for config in probed] == [4] + [2] * num_runs


class Losing(Staged):
    """The baseline does not fit; one config loses to another, which then fails."""

    def peak_bytes(self, config):
        return int((0.93 if config["optimizer_impl"] == "fused" else 2) * LIMIT_BYTES)

    def samples_per_s(self, config):
        return 105.0 if config.batch_size == 2 else 100.0

    def in_play_off(self, config, settings, outcome):
        return OOM if config.batch_size == 2 and self.played.count(config) >= 3 else outcome


def test_a_search_ends_when_the_winner_of_its_play_off_fails_and_nobody_is_left_to_come_in(tmp_path, monkeypatch):
    held = []

    def play(*args, **options):
        held.append(confirm(*args, **options))
        assert len(held) < 10, "the search never ends"
        return held[-1]

    monkeypatch.setattr("autotune.tuning.search.confirm", play)
    support = {name: Support(choices=(technique.off,)) for name, technique in techniques.items()}
    support["optimizer_impl"] = Support(choices=("default", "fused"))
    found = replace(
        FOUND,
        global_batch=4,
        baseline=techniques.complete({"batch_size": 4}, global_batch=4).as_dict(),
        batch=BatchSupport(sizes=(2, 4), accumulation_steps=(1, 2)),
        support=support,
    )
    made = recommender(tmp_path, Losing(noise=0.002), inspection=found, sampler="grid", num_trials=None, budget_s=60.0)
    result = answer(made)
    assert result.confirmed and result.config["batch_size"] == 4


def test_a_play_off_without_an_answer_that_taught_nothing_is_not_held_again(tmp_path, monkeypatch):
    held = []

    def nobody_won(search, admit, **options):
        held.append(search)
        assert len(held) < 10, "the search never ends"
        return Standing(
            answer=None, baseline=None, candidate=None, gain=None, speedup=None, entrants=(), figures={}, num_rounds=1
        )

    monkeypatch.setattr("autotune.tuning.search.confirm", nobody_won)
    assert not answer(recommender(tmp_path, Staged())).confirmed


def test_the_budget_that_would_do_counts_the_rounds_of_one_that_is_out(tmp_path):
    made = recommender(tmp_path, Staged(), budget_s=100.0)
    made.untried = lambda: Listed(())
    base, other = made.history.space.baseline, made.history.space.complete({"amp": "bf16"})
    measured = Outcome(kind=Kind.OK, measurement=measurement(other, 100.0, LIMIT_BYTES // 2), wall_s=10.0)
    baseline = Entrant(base, wall_s=10.0)
    rival = Entrant(other, wall_s=10.0, outcomes=dict.fromkeys(range(4), measured), lost_to=baseline)
    standing = Standing(
        answer=baseline,
        baseline=baseline,
        candidate=rival,
        gain=(1.0, 0.9, 1.1),
        speedup=(1.0, 0.9, 1.1),
        entrants=(rival,),
        figures={},
        num_rounds=4,
    )
    word, why = verdict_of(made, standing, standing.speedup, kept=True)
    assert word == "undecided" and "--budget 270s would be enough" in why  # twelve more rounds of 20 s
    once = replace(standing, num_rounds=1, speedup=(1.0, 0.02, 50.0))
    _, why = verdict_of(made, once, once.speedup, kept=True)
    assert "processes differ too much" not in why and "would be enough" in why  # nobody knows yet how much they differ


@pytest.mark.parametrize(
    ("gain", "speedup"), [(0.6, 1.5), (2.0, 0.8)], ids=["faster in more memory", "too slow in less memory"]
)
def test_a_kept_baseline_is_not_open_to_doubt_for_one_that_its_objective_rules_out(tmp_path, gain, speedup):
    made = recommender(tmp_path, Staged(), objective="memory")
    made.untried = lambda: Listed(())
    base, other = (Entrant(made.history.space.complete({"amp": amp})) for amp in ("off", "bf16"))
    standing = Standing(
        answer=base,
        baseline=base,
        candidate=other,
        gain=(gain, gain * 0.99, gain * 1.01),
        speedup=(speedup, speedup * 0.9, speedup * 1.1),
        entrants=(other,),
        figures={},
        num_rounds=4,
    )
    found = gain_of(made, standing, standing.speedup, kept=True)
    assert verdict_of(made, standing, found, kept=True) == ("same", "")


def test_a_config_that_a_slow_probe_hid_comes_in_when_the_others_have_lost(tmp_path):
    """The search saw it 30 % too slow, which is no news on a machine whose processes differ as much."""

    class Unlucky(Staged):
        """Processes differ by 12 % up or down, the baseline's up where the others' are down."""

        def samples_per_s(self, config):
            number, is_baseline = self.configs.count(config), config == made.history.space.baseline
            true = 150.0 if config.batch_size == 12 else 100.0
            if number == 1:
                return {4: 100.0, 12: 100.0}.get(config.batch_size, 115.0)
            return true * (1.12 if number % 2 == is_baseline else 0.88)

    runner = Unlucky()
    made = recommender(tmp_path, runner, num_trials=None, fix={"checkpoint_segments": 0})
    configs = [made.history.space.complete({"batch_size": size, "amp": "bf16"}) for size in (12, 8, 6)]
    made.proposer = lambda: Listed(configs)
    made.undo_changes = made.untried = lambda: Listed(())
    result = answer(made)
    assert configs[0] in runner.played
    assert result.config == configs[0].as_dict()


class FoundLate(Staged):
    """One config equals the baseline and plays; what is found after that leaves time to compare it, and none to play it."""

    late_gain = 4.0

    def samples_per_s(self, config):
        return 100.0 * (self.late_gain if config["amp"] == "fp16" else 1.0)

    def outcome_of(self, config, settings):
        if config["amp"] != "fp16":
            return super().outcome_of(config, settings)
        self.waited_s += 900.0
        return replace(super().outcome_of(config, settings), wall_s=900.0)


def found_late(folder, late_gain):
    runner = FoundLate(noise=0.02)
    runner.late_gain = late_gain
    made = recommender(folder, runner, num_trials=None)
    early, late = (made.history.space.complete({"amp": choice}) for choice in ("bf16", "fp16"))
    untried = Listed([late])
    made.proposer, made.undo_changes, made.untried = lambda: Listed([early]), lambda: Listed(()), lambda: untried
    return answer(made), made.history.space.baseline, late


def test_what_was_found_too_late_to_play_and_is_far_faster_is_the_answer_and_not_confirmed(tmp_path):
    result, _, late = found_late(tmp_path, 4.0)
    assert result.config == late.as_dict() and not result.confirmed and result.verdict == "undecided"
    assert result.speedup == pytest.approx(4.0, rel=0.2) and result.speedup_ci[0] < 4 < result.speedup_ci[1]
    assert result.samples_per_s / result.baseline.samples_per_s == pytest.approx(result.speedup)
    assert any("too late to play" in text for text in result.warnings)


def test_what_was_found_too_late_to_play_and_may_be_lucky_does_not_take_the_place_of_who_played(tmp_path):
    result, baseline, _ = found_late(tmp_path, 1.02)
    assert result.config == baseline.as_dict() and result.confirmed


@pytest.mark.parametrize("slowdown", [1.7, 3.0])
def test_a_machine_that_slowed_down_after_the_baselines_probe_does_not_decide(tmp_path, slowdown):
    """One probe at a quick moment says that nothing beats the baseline; a second one says what it does now."""

    class Slowed(Staged):
        def samples_per_s(self, config):
            return super().samples_per_s(config) / (slowdown if len(self.configs) > 1 else 1.0)

    made = recommender(tmp_path, Slowed(noise=0.02), num_trials=None)
    choices = {"amp": "bf16"}, {"optimizer_impl": "fused"}  # 1.4 and 1.05 times as fast
    made.proposer = lambda: Listed([made.history.space.complete(changed) for changed in choices])
    made.undo_changes = made.untried = lambda: Listed(())
    result = answer(made)
    assert result.verdict == "faster" and result.config["amp"] == "bf16"
    assert [trial.stage for trial in made.history.searched].count("baseline") == 2


def test_a_baseline_far_ahead_of_the_others_is_confirmed_against_the_best_of_them(tmp_path):
    class Slower(Staged):
        def samples_per_s(self, config):
            return 100.0 if config == made.history.space.baseline else 50.0

    made = recommender(tmp_path, Slower(noise=0.02), num_trials=12)
    result = answer(made)
    assert result.confirmed and result.config == made.history.space.baseline.as_dict()
    assert result.rival.speedup == pytest.approx(0.5, rel=0.1)


def test_where_the_number_of_probes_left_the_question_open_more_of_them_are_asked_for(tmp_path):
    class Slower(Staged):
        def samples_per_s(self, config):
            return 100.0 if config == made.history.space.baseline else 50.0

    made = recommender(tmp_path, Slower(), num_trials=2)
    result = answer(made)
    assert result.verdict == "undecided" and "1 config ran beside the baseline" in result.undecided
    assert "more than --trials 2 would be enough" in result.undecided


class Growing(Staged):
    """Memory grows with every step."""

    leaks: tuple[Kept, ...] = ()
    later_bytes = 0

    def outcome_of(self, config, settings):
        outcome = super().outcome_of(config, settings)
        if outcome.measurement is None:
            return outcome
        later_bytes = self.grown_later(config)
        found = replace(
            outcome.measurement, growth_bytes_per_step=2e6, leaks=self.leaks, long_run_growth_bytes=later_bytes
        )
        return replace(outcome, measurement=found)

    def grown_later(self, config):
        """Bytes by which a long run is expected to grow."""
        return self.later_bytes


def test_growth_in_which_no_tensors_were_found_is_not_called_the_training_codes(tmp_path):
    """A recurrent network that meets a new length in every batch: oneDNN keeps a kernel for each."""
    prober = Growing()
    prober.later_bytes = 100 * 2**20
    result = answer(recommender(tmp_path, prober))
    (warning,) = [text for text in result.warnings if "memory still grows where a probe ends" in text]
    assert "No tensors were found that the training code keeps" in warning and "`autotune verify`" in warning
    assert "a long run is expected to need about 620 MiB of the limit of 1000 MiB" in warning
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY=64" in warning


def test_growth_of_which_no_long_run_is_estimated_is_told_with_the_steps_that_are_left(tmp_path):
    result = answer(recommender(tmp_path, Growing()))
    (warning,) = [text for text in result.warnings if "memory grows by 1.91 MiB" in text]
    assert "No tensors were found that the training code keeps" in warning and "`autotune verify`" in warning
    assert "exceeds the limit of 1000 MiB about 251 steps after the point where a probe ends" in warning


class GrowingInBf16(Growing):
    """A tagger whose batches differ in length: oneDNN keeps kernels of bf16 for each."""

    def grown_later(self, config):
        return 900 * 2**20 if config["amp"] == "bf16" else 0


def test_what_a_long_run_would_not_have_the_memory_for_is_no_answer(tmp_path):
    for name in ("flat", "growing"):
        (tmp_path / name).mkdir()
    assert answer(recommender(tmp_path / "flat", Staged(), num_trials=12)).config["amp"] == "bf16"
    search = recommender(tmp_path / "growing", GrowingInBf16(), num_trials=12)
    assert answer(search).config["amp"] == "fp16"
    in_bf16 = [outcome for config, outcome in search.history.known.items() if config["amp"] == "bf16" and outcome.ok]
    assert in_bf16 and all(search.history.objective.does_not_fit(outcome) for outcome in in_bf16)


def test_a_faster_config_that_a_long_run_would_not_have_the_memory_for_is_named_with_what_would_allow_it(tmp_path):
    search = recommender(tmp_path, GrowingInBf16(), num_trials=12)
    search.proposer = lambda: Listed([search.history.space.complete({"amp": "bf16"})])
    search.undo_changes = search.untried = lambda: Listed(())
    (warning,) = [text for text in answer(search).warnings if "times as fast as the answer" in text]
    assert re.search(r"bf16.* ran 1\.4\d? times as fast as the answer in \d+ MiB, but its memory still grew", warning)
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY=64" in warning
    assert re.search(r"a --memory-limit of 1\.\d+ GiB lets it take part", warning)


def test_a_leak_is_named_by_its_line_in_the_searchs_warning(tmp_path):
    kept = Kept(
        num_tensors=1, num_bytes=4, shape=(), dtype="float32", place="model.py, line 31", in_graph=False, has_graph=True
    )
    runner = Growing()
    runner.leaks = (kept,)
    result = answer(recommender(tmp_path, runner))
    (warning,) = [text for text in result.warnings if "memory grows by 1.91 MiB" in text]
    assert (
        "every micro batch the training code keeps 1 float32 tensor of shape (), with its autograd graph, made in model.py, line 31"
        in warning
    )
