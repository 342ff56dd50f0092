"""Reading a study from its file, whatever state it is in."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autotune.errors import StudyError
from autotune.records.measured import Dropped
from autotune.records.outcome import Kind, Outcome
from autotune.study.facts import agree_on_limit
from autotune.study.place import place_of
from autotune.study.reading import load_study
from tests.closed_form import ClosedFormRunner, make_search
from tests.report.sample_study import ANSWER, BASELINE, HEADROOM, LIMIT, RUNNER_UP, but, measured, write_study


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("reading") / "gpt.db")


def test_every_finished_probe_is_read_with_what_the_search_noted(file: Path) -> None:
    study = load_study(file)
    first, last = study.probes[0], study.probes[-1]
    assert (first.number, first.stage, first.reason, first.round) == (0, "baseline", "what you run today", None)
    assert first.config == BASELINE and first.outcome == measured(BASELINE) and first.feasible
    assert (last.stage, last.round, last.config) == ("play-off", 2, BASELINE)
    assert {probe.outcome.kind for probe in study.probes} == set(Kind) - {Kind.UNSUPPORTED}


def test_trials_without_an_outcome_are_counted_and_are_no_probes(file: Path) -> None:
    study = load_study(file)
    assert (study.num_running, study.num_lost) == (1, 1)
    assert len(study.probes) == len({probe.number for probe in study.probes}) == 52


def test_the_attributes_and_the_answer_are_read(file: Path) -> None:
    study = load_study(file)
    assert study.name == "gpt" and study.storage == str(file)
    assert (study.memory_limit_bytes, study.headroom, study.baseline_config) == (LIMIT, HEADROOM, BASELINE.as_dict())
    assert study.result is not None and study.result.config == ANSWER.as_dict()


def test_a_storage_url_does_as_well_as_a_file(file: Path) -> None:
    assert load_study(f"sqlite:///{file}", study="gpt").probes == load_study(file).probes


def test_a_config_of_the_play_off_counts_once_by_its_fresh_processes(file: Path) -> None:
    by_config = {tuple(m.config.items()): m for m in load_study(file).measured_configs()}
    assert by_config[ANSWER.choices].num_processes == 3
    assert by_config[RUNNER_UP.choices].samples_per_s_ci[0] < by_config[RUNNER_UP.choices].samples_per_s
    assert all(
        m.num_processes == 1
        for choices, m in by_config.items()
        if choices not in (c.choices for c in (ANSWER, RUNNER_UP, BASELINE))
    )


def test_the_front_holds_what_is_feasible_and_unbeaten(file: Path) -> None:
    front = load_study(file).front_configs()
    assert front[-1].config == ANSWER.as_dict()
    assert [m.peak_bytes for m in front] == sorted(m.peak_bytes for m in front)
    assert [m.samples_per_s for m in front] == sorted(m.samples_per_s for m in front)
    assert all(m.peak_bytes <= LIMIT * (1 - HEADROOM) for m in front)


def test_a_finalist_that_the_play_off_dropped_is_read_with_the_reason(tmp_path: Path) -> None:
    file = write_study(tmp_path / "gpt.db", with_probes=False)
    given = load_study(file).result
    assert given is not None
    dropped = Dropped(**vars(given.finalists[1]), dropped="oom: no memory")
    told = but(given, finalists=(given.finalists[0], dropped))
    optuna.load_study(study_name="gpt", storage=f"sqlite:///{file}").set_user_attr("result", told.to_dict())
    assert load_study(file).result == told


def test_a_failure_that_passed_when_it_was_tried_again_does_not_count(file: Path) -> None:
    study = load_study(file)
    first = study.probes[0]
    crashed = replace(first, outcome=Outcome(kind=Kind.CRASHED, cause="gone"), feasible=False)
    tried_again = replace(study, probes=(crashed, *study.probes))
    assert tried_again.measured_configs() == study.measured_configs()
    failed_last = replace(study, probes=(*study.probes, replace(crashed, stage="play-off")))
    assert BASELINE not in [measured.config for measured in failed_last.measured_configs()]


def test_a_study_with_no_finished_probe_is_read(tmp_path: Path) -> None:
    study = load_study(write_study(tmp_path / "new.db", with_probes=False, with_result=False))
    assert (study.probes, study.result, study.front_configs()) == ((), None, ())


def test_a_study_is_read_while_a_search_writes_to_it(file: Path) -> None:
    writer = sqlite3.connect(file, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM trials WHERE number = 0")
    try:
        assert load_study(file).probes[0].number == 0
    finally:
        writer.execute("ROLLBACK")
        writer.close()


def test_a_file_that_may_only_be_read_is_read_and_left_as_it_is(file: Path, tmp_path: Path) -> None:
    file = shutil.copy(file, tmp_path / "gpt.db")
    file.chmod(stat.S_IRUSR)
    before = file.read_bytes()
    assert load_study(file).probes
    assert file.read_bytes() == before and os.listdir(tmp_path) == ["gpt.db"]


@pytest.mark.parametrize("name", ["with space.db", "Studie größer.db", "100%?#{x}.db"])
def test_any_file_name_works(file: Path, tmp_path: Path, name: str) -> None:
    assert load_study(shutil.copy(file, tmp_path / name)).probes


def test_a_missing_file_is_not_made_and_its_neighbours_are_offered(tmp_path: Path) -> None:
    write_study(tmp_path / "digits.db", with_probes=False, with_result=False)
    with pytest.raises(StudyError, match=r"no study file .*digit\.db; did you mean .*digits\.db"):
        load_study(tmp_path / "digit.db")
    assert os.listdir(tmp_path) == ["digits.db"]


def test_where_no_neighbour_is_like_it_they_are_listed(tmp_path: Path) -> None:
    write_study(tmp_path / "digits.db", with_probes=False, with_result=False)
    with pytest.raises(StudyError, match=r"no study file .*tagger; there is .*digits\.db$"):
        load_study(tmp_path / "tagger")


def test_a_missing_file_with_no_neighbour_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StudyError, match=r"autotune search model.py"):
        load_study("gpt.db")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, but long enough to be taken for one at first sight" * 20)
    with pytest.raises(StudyError, match="cannot be read as a study"):
        load_study(tmp_path / "notes.txt")


def test_what_the_option_study_named_is_found_by_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies").mkdir()
    write_study(tmp_path / "studies" / "wide.db", with_probes=False, with_result=False)
    assert load_study("wide").storage == load_study("studies/wide.db").storage == "studies/wide.db"


def test_a_folder_of_the_models_name_does_not_hide_its_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("studies", "gpt"):
        (tmp_path / folder).mkdir()
    write_study(tmp_path / "studies" / "gpt.db", with_probes=False, with_result=False)
    assert load_study("gpt").storage == "studies/gpt.db"
    with pytest.raises(StudyError, match=r"gpt is a folder; .*; did you mean studies/gpt\.db\?"):
        load_study("gpt/")


def test_a_model_file_in_place_of_its_study_leads_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "studies").mkdir()
    write_study(tmp_path / "studies" / "mlp.db", with_probes=False, with_result=False)
    (tmp_path / "mlp.py").write_text("def build_model(): ...\n" * 100)
    with pytest.raises(StudyError, match=r"mlp\.py cannot be read as a study.*; did you mean studies/mlp\.db\?"):
        load_study("mlp.py")


def test_a_folder_is_refused_and_its_studies_are_offered(tmp_path: Path) -> None:
    write_study(tmp_path / "gpt.db", with_probes=False, with_result=False)
    with pytest.raises(StudyError, match=r"is a folder.*gpt\.db"):
        load_study(tmp_path)


def test_a_foreign_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE orders (id INTEGER)")
    with pytest.raises(StudyError, match="without a study"):
        load_study(file)
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("orders",)]


def test_an_optuna_study_of_something_else_is_refused(tmp_path: Path) -> None:
    optuna.create_study(storage=f"sqlite:///{tmp_path / 'other.db'}", study_name="other")
    with pytest.raises(StudyError, match="not made by autotune"):
        load_study(tmp_path / "other.db")


def test_a_study_of_a_later_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    file = write_study(tmp_path / "later.db", with_probes=False, with_result=False)
    optuna.load_study(storage=f"sqlite:///{file}", study_name="gpt").set_user_attr("format", 99)
    with pytest.raises(StudyError, match=r"has format 99, this autotune reads up to \d+; upgrade it"):
        load_study(file)


def test_of_several_studies_one_has_to_be_named(tmp_path: Path) -> None:
    file = write_study(tmp_path / "both.db", name="gpt", with_probes=False, with_result=False)
    write_study(file, name="digits", with_probes=False, with_result=False)
    with pytest.raises(StudyError, match=r"holds 2 studies.*--study: digits, gpt"):
        load_study(file)
    assert load_study(file, study="digits").name == "digits"
    with pytest.raises(StudyError, match="no study 'tagger'; it holds: digits, gpt"):
        load_study(file, study="tagger")


def test_a_storage_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(StudyError, match="cannot be read"):
        load_study("nosuch://host/base")


def test_a_study_that_searches_have_only_agreed_on_is_none_yet(tmp_path: Path) -> None:
    url = f"journal:///{tmp_path}/gpt.log"
    agree_on_limit(place_of(url, "failed", "closed"), 2**30)
    for name in (None, "failed"):
        with pytest.raises(StudyError, match="holds no study yet; `autotune search` makes one"):
            load_study(url, study=name)
    make_search(tmp_path, ClosedFormRunner(), storage=url).store.close()
    assert load_study(url).name == "closed"
