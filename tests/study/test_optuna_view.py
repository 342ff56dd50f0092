"""What Optuna and its tools see in the file of a search: each config of the search once, and nothing infeasible as good."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from autotune.errors import StudyError
from autotune.records.config import Config, ProbeSettings
from autotune.records.objective import Throughput
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Result
from autotune.records.study import PLAY_OFF, Fingerprint, Proposal, SearchFacts
from autotune.study.place import place_of
from autotune.study.reading import load_study
from autotune.study.store import Store
from autotune.tuning.search import answer
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection, make_search, measurement

FOUND = inspection()


class Rough(ClosedFormRunner):
    """Some configs hang, some need too much; a config's second process is twice as fast, as on a machine that calms down."""

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        outcome = super().outcome_of(config, settings)
        if outcome.measurement is None:
            return outcome
        speed, peak_bytes = outcome.measurement.samples_per_s, outcome.measurement.peak_bytes
        if self.configs.count(config) > 1:
            speed *= 2
        elif len(self.configs) % 5 == 3:
            return Outcome(kind=Kind.TIMEOUT, cause="no end within 20 s", wall_s=0.1)
        elif len(self.configs) % 5 == 4:
            peak_bytes = LIMIT_BYTES
        return Outcome(kind=Kind.OK, measurement=measurement(config, speed, peak_bytes), wall_s=0.1)


def searched(folder: Path) -> Result:
    search = make_search(folder, Rough(noise=0.01, seed=3), sampler="tpe", num_trials=16, inspection=FOUND)
    result = answer(search)
    assert result is not None
    return result


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    searched(folder)
    return folder / "closed.db"


def loaded(file: Path, name: str = "closed") -> optuna.Study:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{file}")


def test_the_best_trial_is_the_best_feasible_config_of_the_search(file: Path) -> None:
    probes = [probe for probe in load_study(file).probes if not probe.in_play_off and probe.feasible]
    best = max(probes, key=lambda probe: probe.score)
    assert loaded(file).best_trial.user_attrs["config"] == best.config.as_dict()
    assert loaded(file).best_value == best.score


def test_the_play_off_is_a_study_of_its_own(file: Path) -> None:
    search, play_off = loaded(file).trials, loaded(file, "closed play-off").trials
    configs = [tuple(trial.user_attrs["config"].items()) for trial in search]
    assert len(set(configs)) == len(configs) == 16
    assert {trial.user_attrs["stage"] for trial in play_off} == {"play-off"} and len(play_off) > 3
    assert {trial.user_attrs["stage"] for trial in search} >= {"baseline", "search"}


def test_nobody_takes_an_infeasible_trial_for_good(file: Path) -> None:
    infeasible = [trial for trial in loaded(file).trials if not trial.user_attrs["feasible"]]
    assert {trial.user_attrs["ended"] for trial in infeasible} == {"timeout", "oom", "over the limit"}
    assert all(trial.value == 0.0 and trial.constraints["infeasibility"] > 0 for trial in infeasible)
    assert all(trial.value > 0 for trial in loaded(file).trials if trial not in infeasible)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optunas_table_and_plots_work_on_the_file(file: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    from optuna.visualization import matplotlib as plots

    frame = loaded(file).trials_dataframe()
    assert loaded(file).metric_names == ["samples_per_s"] == loaded(file, "closed play-off").metric_names
    assert len(frame) == 16 and frame["value_samples_per_s"].max() == loaded(file).best_value
    assert set(frame[frame["value_samples_per_s"] == 0]["user_attrs_ended"]) == {"timeout", "oom", "over the limit"}
    assert frame["user_attrs_peak_bytes"].notna().sum() == (~frame["user_attrs_ended"].isin(["timeout", "oom"])).sum()
    for plot in (plots.plot_optimization_history, plots.plot_slice):
        assert plot(loaded(file)) is not None


def test_a_reader_finds_both_by_the_searchs_name_alone(file: Path) -> None:
    study = load_study(file)
    assert study.name == "closed" and {probe.stage for probe in study.probes} >= {"baseline", "search", "play-off"}
    assert [probe.number for probe in study.probes] == list(range(len(study.probes)))
    with pytest.raises(StudyError, match="no study 'closed play-off'; it holds: closed"):
        load_study(file, study="closed play-off")


def test_two_searches_in_one_file_keep_their_play_offs_apart(tmp_path: Path) -> None:
    searched(tmp_path)
    place = place_of(str(tmp_path / "closed.db"), "other", "closed")
    Store(place, SearchFacts(fingerprint=Fingerprint(task="abc")))
    with pytest.raises(StudyError, match="holds 2 studies; choose one with --study: closed, other"):
        load_study(tmp_path / "closed.db")
    assert load_study(tmp_path / "closed.db", study="other").probes == ()
    assert any(probe.in_play_off for probe in load_study(tmp_path / "closed.db", study="closed").probes)


def test_a_resumed_search_knows_both(tmp_path: Path) -> None:
    searched(tmp_path)
    before = load_study(tmp_path / "closed.db").probes
    resumed = make_search(tmp_path, Rough(), sampler="tpe")
    assert resumed.history.trials == before
    assert resumed.history.num_resumed == sum(not probe.in_play_off for probe in before) == 16


def test_an_older_study_that_holds_its_play_off_itself_is_read_and_continued(tmp_path: Path) -> None:
    search = make_search(tmp_path, runner := ClosedFormRunner())
    store, space, baseline = search.store, search.history.space, search.history.space.baseline
    objective = Throughput(memory_limit_bytes=LIMIT_BYTES, headroom=0.05)
    outcome = runner.probe(baseline, search.settings)
    old = loaded(tmp_path / "closed.db")
    for number, stage in enumerate(("baseline", PLAY_OFF)):
        described = {"config": baseline.as_dict(), "stage": stage, "reason": "", "prediction": None, "feasible": True}
        old.add_trial(
            optuna.trial.create_trial(value=9.0 + number, user_attrs={**described, "outcome": outcome.to_dict()})
        )
    old.set_user_attr("format", 2)
    store = make_search(tmp_path, ClosedFormRunner()).store
    number = store.begin(Proposal(config=baseline, stage=PLAY_OFF, round=1), None, space)
    store.finish(number, outcome, objective, disturbed=False)
    assert [(probe.number, probe.stage) for probe in load_study(tmp_path / "closed.db").probes] == [
        (0, "baseline"),
        (1, "play-off"),
        (2, "play-off"),
    ]


def test_somebody_elses_study_with_the_play_offs_name_is_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'closed.db'}"
    other = optuna.create_study(storage=url, study_name="closed play-off")
    other.add_trial(optuna.trial.create_trial(value=1.0))
    with pytest.raises(StudyError, match=r"closed play-off .* was not made by autotune; use another with --study"):
        make_search(tmp_path, ClosedFormRunner())
    assert len(other.trials) == 1


def test_numbers_go_on_where_a_killed_search_ended(tmp_path: Path) -> None:
    search = make_search(tmp_path, runner := ClosedFormRunner())
    space, objective = search.history.space, search.history.objective
    outcome, proposal = runner.probe(space.baseline, search.settings), Proposal(config=space.baseline)
    search.store.finish(search.store.begin(proposal, None, space), outcome, objective, disturbed=False)
    search.store.begin(proposal, None, space)
    again = make_search(tmp_path, ClosedFormRunner()).store
    assert again.begin(proposal, None, space) == 1
