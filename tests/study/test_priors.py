"""Where what studies teach is kept: an Optuna journal a machine, which survives two writers, a crash and whatever lies in its place."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.errors import StudyError
from autotune.records.outcome import Kind
from autotune.records.priors import PriorStudy, PriorTrial
from autotune.study import priors
from autotune.study.priors import PriorStore
from tests.records.test_priors import here

BASELINE = {"batch_size": 4, "accumulation_steps": 8, "amp": "off"}


def left(name: str = "some 1", searched_at: str = "2026-01-01", speed: float = 1.5) -> PriorStudy:
    faster = PriorTrial(config={**BASELINE, "amp": "bf16"}, kind=Kind.OK, speed=speed, peak=0.8)
    return PriorStudy(
        name=name,
        circumstances=here(),
        baseline=dict(BASELINE),
        space={"amp": ("off", "bf16")},
        answer=faster.config,
        searched_at=searched_at,
        trials=(PriorTrial(config=dict(BASELINE), kind=Kind.OK, speed=1.0, peak=1.0), faster),
    )


def test_what_is_kept_is_read_again_the_newest_first(tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    assert store.studies() == []
    first, second = left(), left("other 2", "2026-02-02")
    store.keep(first)
    store.keep(second)
    assert PriorStore(tmp_path).studies() == [second, first]


def test_a_later_search_of_a_study_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    store.keep(left(speed=1.5))
    store.keep(left(speed=1.7))
    assert store.studies() == [left(speed=1.7)]


def test_what_an_earlier_search_of_a_task_tried_besides_stays(tmp_path: Path) -> None:
    store, earlier = PriorStore(tmp_path), left()
    plain, faster = earlier.trials
    other = replace(plain, config={**BASELINE, "amp": "fp16"}, speed=1.2)
    later = replace(left(searched_at="2026-02-02"), answer={}, space={"amp": ("off", "fp16")}, trials=(plain, other))
    store.keep(earlier)
    store.keep(later)
    (kept,) = store.studies()
    assert kept.trials == (plain, other, faster)
    assert kept.answer == earlier.answer and kept.searched_at == later.searched_at
    assert kept.space == {"amp": ("off", "fp16", "bf16")}
    store.keep(replace(later, baseline={**BASELINE, "batch_size": 8, "accumulation_steps": 4}))
    assert store.studies()[0].answer == {}, "what is over another baseline is not taken over"


def test_optuna_itself_opens_the_journal(tmp_path: Path) -> None:
    PriorStore(tmp_path).keep(left())
    (file,) = PriorStore(tmp_path).files
    study = optuna.load_study(study_name="some 1", storage=JournalStorage(JournalFileBackend(str(file))))
    assert study.best_trial.value == 1.5
    assert study.best_trial.params == {"amp": "bf16"}


def test_a_forgotten_study_leaves_nothing_in_the_file(tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    store.keep(left("secret 1"))
    store.keep(left("other 2"))
    assert store.forget("secret 1") == ["secret 1"]
    assert [study.name for study in store.studies()] == ["other 2"]
    assert "secret" not in store.files[0].read_text()
    with pytest.raises(StudyError, match=r"'secret 1' is not remembered.*'other 2'"):
        store.forget("secret 1")
    assert store.forget() == ["other 2"]
    assert store.files == []


def test_the_name_of_its_task_is_enough_for_the_only_study_of_it(tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    for name in ("some task 1", "other 2", "other 3"):
        store.keep(left(name))
    with pytest.raises(StudyError, match="'other' is not remembered"):
        store.forget("other")
    assert store.forget("some task") == ["some task 1"]


@pytest.mark.parametrize("content", [b"\x00\xff not a journal", b"one line", b'{"some": "json"}\n{"of": "others"}\n'])
def test_a_foreign_file_is_set_aside_and_what_comes_after_is_kept(tmp_path: Path, content: bytes) -> None:
    told: list[str] = []
    store = PriorStore(tmp_path, told.append)
    store.keep(left())
    (file,) = store.files
    file.write_bytes(content + b"\n")
    assert store.studies() == []
    assert file.with_suffix(".aside").read_bytes().startswith(content)
    assert "set aside" in told[0]
    store.keep(left())
    assert store.studies() == [left()]
    assert len(told) == 1
    store.forget()
    assert file.with_suffix(".aside").exists()


def test_forgetting_all_leaves_no_journal_that_was_set_aside(tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    store.keep(left("secret 1"))
    (file,) = store.files
    file.write_bytes(b"damaged\n" + file.read_bytes())
    assert store.studies() == [] and "secret" in file.with_suffix(".aside").read_text()
    store.forget()
    assert not list(tmp_path.rglob("*.aside"))


def test_what_is_remembered_of_a_study_stays_where_writing_it_anew_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(storage: JournalStorage, study: PriorStudy) -> None:
        optuna.create_study(storage=storage, study_name=study.name)
        raise KeyboardInterrupt

    store = PriorStore(tmp_path)
    store.keep(left())
    with monkeypatch.context() as patch:
        patch.setattr(priors, "_write", cut_short)
        with pytest.raises(KeyboardInterrupt):
            store.keep(left(speed=1.7))
    assert store.studies() == [left()]
    store.keep(left(speed=1.7))
    assert store.studies() == [left(speed=1.7)]


def test_forgetting_leaves_nothing_of_a_writing_that_was_cut_short(tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    store.keep(left("secret 1"))
    store.keep(left("other 2"))
    store.files[0].with_suffix(".part").write_bytes(store.files[0].read_bytes())
    store.forget("secret 1")
    assert not list(tmp_path.rglob("*.part"))


def test_another_programs_journal_is_set_aside(tmp_path: Path) -> None:
    told: list[str] = []
    store = PriorStore(tmp_path, told.append)
    store.keep(left())
    (file,) = store.files
    file.unlink()
    optuna.create_study(storage=JournalStorage(JournalFileBackend(str(file))), study_name="mine")
    assert store.studies() == []
    assert "holds nothing that a search has left" in told[0]


def test_a_second_file_that_is_set_aside_leaves_the_first(tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    for content in (b"one", b"another"):
        store.keep(left())
        (file,) = store.files
        file.write_bytes(content + b" line\n")
        assert store.studies() == []
    set_aside = sorted(tmp_path.rglob("*.aside"))
    assert [one.read_bytes() for one in set_aside] == [b"another line\n", b"one line\n"]


def test_a_last_line_that_was_cut_short_costs_nothing_else(tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    store.keep(left())
    with store.files[0].open("a") as file:
        file.write('{"op_code": 4, "wor')
    assert store.studies() == [left()]
    store.keep(left("other 2"))
    assert {study.name for study in store.studies()} == {"some 1", "other 2"}


def test_what_a_later_version_wrote_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(priors, "FORMAT", priors.FORMAT + 1)
        PriorStore(tmp_path).keep(left())
    told: list[str] = []
    store = PriorStore(tmp_path, told.append)
    assert store.studies() == []
    assert "upgrade" in told[0]
    assert len(store.files) == 1


def test_a_journal_that_has_become_large_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priors, "MOST_BYTES", 1)
    monkeypatch.setattr(priors, "MOST_STUDIES", 2)
    store = PriorStore(tmp_path)
    for day in range(1, 5):
        store.keep(left(f"some {day}", f"2026-01-0{day}"))
    assert [study.name for study in store.studies()] == ["some 4", "some 3"]


def _keep_several(folder: Path, writer: int) -> None:
    for number in range(4):
        PriorStore(folder).keep(left(f"writer {writer}, {number}"))


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_keep_several, args=(tmp_path, number)) for number in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {study.name for study in PriorStore(tmp_path).studies()} == {
        f"writer {writer}, {number}" for writer in range(2) for number in range(4)
    }


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / ".priors").write_text("a file in its place")
    store = PriorStore(tmp_path)
    store.keep(left())
    assert store.studies() == []


def test_other_machines_files_are_read_and_not_written(tmp_path: Path) -> None:
    store = PriorStore(tmp_path)
    store.keep(left())
    others = store.files[0].rename(store.files[0].with_name("another.journal"))
    before = others.read_bytes()
    mine = replace(left("mine 3"), searched_at="2026-03-03")
    store.keep(mine)
    assert store.studies() == [mine, left()]
    assert others.read_bytes() == before
