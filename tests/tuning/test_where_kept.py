"""What a search keeps with its study: what it was asked, and what must be equal for measurements to compare."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.errors import StudyError
from autotune.records.device import Slot
from autotune.records.inspection import Inspection, TaskFacts
from autotune.records.options import SearchOptions
from autotune.records.result import Result
from autotune.records.study import Fingerprint, SearchFacts, StudyFacts
from autotune.report.study import study_sections
from autotune.study.facts import agree_on_limit
from autotune.study.place import GONE_AFTER_S, place_of
from autotune.study.reading import load_study
from autotune.study.store import Store
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.tuning.events import Listener
from autotune.tuning.opening import open_search
from autotune.tuning.search import search
from autotune.tuning.where_kept import Kept, fingerprint
from autotune.units import MIB
from tests.closed_form import ClosedFormRunner, inspection
from tests.integrations.answers import known
from tests.notes import Notes

TINY = Path(__file__).parent.parent / "models" / "tiny.py"
FACTS = TaskFacts(
    name="closed",
    source_hash="abc",
    num_parameters=10,
    num_trainable=10,
    parameter_bytes=40,
    batch=("float32 (2, 1, 32, 32)", "int64 (2,)"),
)
GIB = 2**30


def stated(found: Inspection | None = None, early: Fingerprint | None = None) -> SearchFacts:
    """What a search of that task says of itself."""
    return SearchFacts(
        fingerprint=fingerprint(found or inspection(facts=FACTS), find_techniques(), early or Fingerprint())
    )


def asked(source: TaskSource, stored: StudyFacts | None = None, **options: Any) -> dict[str, str | int]:
    place = place_of(None, None, "tiny")
    kept = Kept(place=place, stored=stored, own=place, earlier=stored)
    return kept.options_to_repeat(SearchOptions(**options), source)


def test_only_what_is_no_default_counts_as_asked() -> None:
    source = TaskSource.of(TINY)
    assert asked(source) == {}
    assert asked(source.with_global_batch(96), device="cpu", memory_limit_bytes=GIB) == {
        "device": "cpu",
        "global_batch": 96,
        "memory_limit": GIB,
    }


def test_a_global_batch_that_was_changed_in_python_counts_as_asked() -> None:
    task = dataclasses.replace(autotune.load_task(TINY), global_batch=96)
    assert asked(TaskSource.of(task)) == {"global_batch": 96}


def test_the_devices_of_another_machine_count_as_asked_of_this_one(tmp_path: Path) -> None:
    class Elsewhere(ClosedFormRunner):
        @property
        def devices_here(self) -> dict[str, str]:
            return {"devices": "4"}

    options = SearchOptions(storage=str(tmp_path / "closed.db"))
    with open_search(TaskSource.of(TINY), options, Elsewhere(), Listener()) as opened:
        assert opened.asked == {"devices": "4"}


def test_a_study_that_is_resumed_without_a_limit_keeps_the_one_it_was_given() -> None:
    limited = Fingerprint(memory_limit_bytes=GIB)
    stored = StudyFacts(fingerprint=limited, asked={"memory_limit": GIB, "device": "cpu"})
    place = place_of(None, None, "tiny")
    kept = Kept(place=place, stored=stored, own=place, earlier=stored)
    assert kept.agree(SearchOptions(), 2 * GIB, environment=True).memory_limit_bytes == GIB
    assert asked(TaskSource.of(TINY), stored) == {"memory_limit": GIB}
    assert asked(TaskSource.of(TINY), StudyFacts(fingerprint=limited)) == {}


def test_an_answer_carries_what_was_asked_through_json() -> None:
    from tests.report.sample_study import answer, but

    result = but(answer("sqlite:///gpt.db"), asked={"device": "cpu", "global_batch": 512})
    assert Result.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    without = {key: value for key, value in result.to_dict().items() if key != "asked"}  # of an older study
    assert Result.from_dict(without).asked == {}


@pytest.mark.parametrize(
    "change",
    [
        {"batch": ("float32 (2, 1, 64, 64)", "int64 (2,)")},
        {"batch": ("float64 (2, 1, 32, 32)", "int64 (2,)")},
        {"parameter_bytes": 20},
        {"num_trainable": 4},
    ],
)
def test_sizes_that_come_from_elsewhere_are_a_difference(tmp_path: Path, change: dict[str, Any]) -> None:
    place = place_of(str(tmp_path / "sizes.db"), None, "sizes")
    Store(place, stated())
    Store(place, stated())
    ((name, value),) = change.items()
    with pytest.raises(StudyError) as caught:
        Store(place, stated(inspection(facts=dataclasses.replace(FACTS, **change))))
    was, now = getattr(FACTS, name), value
    if isinstance(value, tuple):  # what both have is left out
        was, now = [was[0]], [now[0]]
    assert f"{name} was {was!r} and is {now!r}." in str(caught.value)


def test_a_study_of_another_task_is_named_so_first_and_long_values_are_cut(tmp_path: Path) -> None:
    place = place_of(str(tmp_path / "other.db"), None, "other")
    Store(place, stated())
    batch = tuple(f"float32 (2, {width})" for width in range(100))
    with pytest.raises(StudyError, match="comparable with it: it is of another task, or of other code; ") as caught:
        Store(place, stated(inspection(facts=dataclasses.replace(FACTS, source_hash="other", batch=batch))))
    assert "batch was " in str(caught.value) and len(str(caught.value)) < 1000


def test_a_study_goes_on_where_the_kernel_keeps_a_page_more_and_not_in_half_the_memory(tmp_path: Path) -> None:
    place, before = place_of(str(tmp_path / "booted.db"), None, "booted"), inspection(facts=FACTS)
    rebooted, halved = (
        dataclasses.replace(before, device=dataclasses.replace(before.device, total_bytes=total_bytes))
        for total_bytes in (2**34 - 4096, 2**33)
    )
    Store(place, stated(before))
    Store(place, stated(rebooted))
    with pytest.raises(StudyError, match=r"memory of the device was 16\.0 GiB and is 8\.00 GiB"):
        Store(place, stated(halved))


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"headroom": "10%"}, "headroom was 0.05 and is 0.1"),
        ({"objective": "memory"}, "objective was 'throughput' and is 'memory'"),
    ],
)
def test_another_option_is_refused_before_the_model_is_imported(
    tmp_path: Path, options: dict[str, Any], difference: str
) -> None:
    with pytest.raises(StudyError, match=rf"{difference}.*--study NAME \(study=NAME in a script\)"):
        resumed(tmp_path, memory_limit=GIB, **options)


def searched(folder: Path, **options: Any) -> tuple[Result, list[str]]:
    """A search with a known answer, and what it noted."""
    notes = Notes()
    asked = {**known(folder), "storage": str(folder / "gpt.db"), "listeners": [notes], "trials": 2, **options}
    return autotune.search(TINY, **asked), notes.texts


def test_another_memory_limit_begins_a_study_beside_the_old_one_and_goes_on_with_it(tmp_path: Path) -> None:
    first, noted = searched(tmp_path, memory_limit="1000MiB")
    assert not any("beside" in text for text in noted)
    smaller, noted = searched(tmp_path, memory_limit="400MiB")
    assert smaller.study == f"{first.study} memory_limit=400MiB" and smaller.peak_bytes <= 400 * MIB
    assert (
        f"the study {first.study} has another memory limit; this search is kept beside it, in '{smaller.study}'"
        in noted
    )
    assert searched(tmp_path, memory_limit="400MiB")[0].study == smaller.study
    for options in ({"memory_limit": "1000MiB"}, {"memory_limit": None}):
        again, noted = searched(tmp_path, **options)
        assert again.study == first.study and again.memory_limit_bytes == 1000 * MIB
        assert again.probes >= first.probes and not any("kept beside" in text for text in noted)
        told = (
            "the memory limit of 1000 MiB is the one that this study began with; another --memory-limit begins a study beside it"
            in noted
        )
        assert told == (options["memory_limit"] is None)
    assert (load_study(tmp_path / "gpt.db", study=smaller.study).memory_limit_bytes) == 400 * MIB


class Shrunken(ClosedFormRunner):
    """On a device of which others hold a part now."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self.free_bytes = free_bytes

    def slots(self) -> tuple[Slot, ...]:
        return tuple(
            dataclasses.replace(slot, device=dataclasses.replace(slot.device, free_bytes=self.free_bytes))
            for slot in super().slots()
        )


def opened_with(free_bytes: float, storage: object) -> tuple[str, int, list[str]]:
    """The study of a search that was asked for no limit, its limit, and what was noted, where so much is free."""
    notes = Notes()
    with open_search(None, SearchOptions(storage=str(storage)), Shrunken(int(free_bytes)), notes) as opened:
        return opened.store.place.study, opened.history.objective.memory_limit_bytes, notes.texts


def test_a_limit_that_is_not_free_any_more_begins_a_study_beside_with_one_that_is(tmp_path: Path) -> None:
    first, limit_bytes, noted = opened_with(10 * GIB, tmp_path / "closed.db")
    assert (limit_bytes, noted) == (10 * GIB, [])
    assert opened_with(9.2 * GIB, tmp_path / "closed.db") == (first, 10 * GIB, [])  # a little over
    smaller, limit_bytes, noted = opened_with(8.3 * GIB, tmp_path / "closed.db")
    assert (smaller, limit_bytes) == (f"{first} memory_limit=8GiB", 8 * GIB)
    assert noted == [
        "only 8.30 GiB are free now, less than this study's memory limit",
        f"the study {first} has another memory limit; this search is kept beside it, in '{smaller}'",
    ]
    for free_bytes in (8.1 * GIB, 7.8 * GIB, 8.6 * GIB, 7.45 * GIB):  # about as much: the same study
        assert opened_with(free_bytes, tmp_path / "closed.db")[:2] == (smaller, 8 * GIB)
    assert opened_with(11 * GIB, tmp_path / "closed.db") == (first, 10 * GIB, [])


class Caching(ClosedFormRunner):
    """Is told where to keep what it compiles."""

    folder: Path

    def keep_compiled(self, folder: Path) -> None:
        self.folder = folder


def cache_of(storage: Path, **options: Any) -> Path:
    """The folder for what is compiled, of a search of a study in that file, with a file in it from then on."""
    runner = Caching()
    with open_search(None, SearchOptions(storage=str(storage), **options), runner, Listener()):
        runner.folder.mkdir(parents=True, exist_ok=True)
        (runner.folder / "kernel.so").touch()
    return runner.folder


def test_a_new_study_begins_without_compiled_code_and_leaves_other_studies_theirs(tmp_path: Path) -> None:
    storage = tmp_path / "closed.db"
    first = cache_of(storage, memory_limit_bytes=GIB)
    beside = cache_of(storage, memory_limit_bytes=2 * GIB)
    another = cache_of(storage, study="another")
    assert len({first, beside, another}) == 3
    assert {folder.parent for folder in (first, beside, another)} == {tmp_path / "closed.compiled"}
    (first / "more.so").touch()
    assert cache_of(storage, memory_limit_bytes=GIB) == first  # it goes on
    assert all((folder / "kernel.so").exists() for folder in (first, beside, another))
    assert (first / "more.so").exists()


def test_a_new_file_begins_without_what_studies_of_a_deleted_one_have_compiled(tmp_path: Path) -> None:
    storage = tmp_path / "closed.db"
    first, beside = (cache_of(storage, memory_limit_bytes=limit_bytes) for limit_bytes in (GIB, 2 * GIB))
    storage.unlink()
    assert cache_of(storage, memory_limit_bytes=GIB) == first and (first / "kernel.so").exists()
    assert not beside.exists()


def test_what_earlier_versions_kept_for_all_studies_of_a_file_is_deleted(tmp_path: Path) -> None:
    storage, old = tmp_path / "closed.db", tmp_path / "closed.compiled" / "kept"
    for _ in range(2):  # a new study, and one that goes on
        old.mkdir(parents=True)
        folder = cache_of(storage)
        assert (folder / "kernel.so").exists() and not old.exists()


def test_where_far_less_than_the_limit_is_free_the_study_is_refused(tmp_path: Path) -> None:
    opened_with(10 * GIB, tmp_path / "closed.db")
    with pytest.raises(
        StudyError, match=r"has a memory limit of 10\.0 GiB, but only 307 MiB are free now; free memory"
    ):
        opened_with(0.3 * GIB, tmp_path / "closed.db")


def test_searches_that_share_a_study_do_not_part_where_one_has_less_memory(tmp_path: Path) -> None:
    storage = f"journal:///{tmp_path / 'closed.log'}"
    opened_with(10 * GIB, storage)
    with pytest.raises(StudyError, match=r"has a memory limit of 10\.0 GiB, but only 8\.00 GiB are free"):
        opened_with(8 * GIB, storage)


def test_of_studies_with_several_limits_the_last_that_was_searched_is_read_and_names_the_others(tmp_path: Path) -> None:
    first, _ = searched(tmp_path, memory_limit="1000MiB")
    second, _ = searched(tmp_path, memory_limit="400MiB")
    read = load_study(tmp_path / "gpt.db")
    assert (read.name, read.others) == (second.study, (first.study,))
    (headline, *_) = study_sections(read)
    assert f"studies with other memory limits (--study NAME): {first.study}" in str(headline)
    third, _ = searched(tmp_path, memory_limit="500MiB")
    searched(tmp_path, memory_limit="1000MiB")
    read = load_study(tmp_path / "gpt.db")
    assert (read.name, read.others) == (first.study, (second.study, third.study))
    searched(tmp_path, study="another", memory_limit="500MiB")
    with pytest.raises(StudyError, match="holds 4 studies; choose one with --study: another, "):
        load_study(tmp_path / "gpt.db")


def test_a_study_of_other_arithmetic_is_refused_before_the_model_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with pytest.raises(StudyError, match="ONEDNN_MAX_CPU_ISA was '' and is 'AVX2'"):
        resumed(tmp_path, memory_limit=GIB)


def resumed(folder: Path, **options: Any) -> None:
    """Resume a study that was begun with the defaults and 1 GiB of memory."""
    (folder / "model.py").write_text("raise SystemExit('imported')")
    begun = Fingerprint(memory_limit_bytes=GIB, headroom=0.05, objective="throughput")
    Store(place_of(str(folder / "gpt.db"), None, folder.name), stated(early=begun))
    autotune.search(folder / "model.py", device="cpu", storage=str(folder / "gpt.db"), **options)


def test_a_study_that_did_not_record_sizes_is_refused_in_words(tmp_path: Path) -> None:
    place = place_of(str(tmp_path / "old.db"), None, "old")
    known = stated()
    Store(place, SearchFacts(fingerprint=dataclasses.replace(known.fingerprint, batch=None)))
    with pytest.raises(StudyError, match=r"batch was not recorded and is \['float32 .*--study NAME"):
        Store(place, known)


def test_a_limit_that_a_failed_search_has_left_in_a_shared_study_binds_none_of_the_next_day(
    tmp_path: Path, short_play_off: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes, url = inspection().device.free_bytes, f"journal:///{tmp_path}/gpt.log"
    options = SearchOptions(storage=url, sampler="random", num_trials=2)
    agree_on_limit(place_of(url, None, "closed"), 2 * free_bytes)
    with pytest.raises(StudyError, match=r"has a memory limit of 16\.0 GiB, but only 8\.00 GiB are free"):
        search(None, options, runner=ClosedFormRunner())
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + 2 * GONE_AFTER_S)
    search(None, options, runner=ClosedFormRunner())
    assert load_study(url).memory_limit_bytes == free_bytes


def test_what_is_no_database_is_refused_before_the_model_is_imported(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise SystemExit('imported')")
    (tmp_path / "notes.db").write_text("not a database, but long enough to be taken for one at first sight" * 20)
    with pytest.raises(StudyError, match=r"notes\.db cannot be opened: file is not a database; expected"):
        autotune.search(tmp_path / "model.py", device="cpu", storage=str(tmp_path / "notes.db"))
