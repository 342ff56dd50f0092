"""Traces kept on disk are shared between searches of a task, and never of another one; calibrations between those of a device."""

from __future__ import annotations

import json
from dataclasses import replace

from autotune.files import drop_oldest
from autotune.prediction.traces import Traces
from autotune.records.device import Calibration, Communicators, DeviceInfo, Rate
from autotune.records.inspection import TaskFacts
from autotune.study.caches import CALIBRATIONS, CalibrationCache, CommunicatorCache, TraceCache, agrees
from autotune.study.caches import TRACES as FOLDER
from tests.prediction.test_traces import DEFAULT, PLAIN, TRACES, fit, piece

MEASURED = Calibration(
    rates=(Rate(work="matmul", arithmetic="bf16", sizes=(64, 128), flops_per_s=(1e9, 2e9), failure="no answer"),),
    bytes_per_s=1e10,
    of={"device": "cpu", "threads": "1"},
)
FACTS = TaskFacts(name="task", source_hash="abc", num_parameters=10)


def cache(folder, *, facts=FACTS, target="cpu", batch_sizes=(4, 8), trained=None):
    return TraceCache(folder, facts, target, batch_sizes, trained or {"freeze": "none"})


def test_what_is_written_is_read_without_the_failures(tmp_path):
    assert cache(tmp_path).read() is None
    cache(tmp_path).write(TRACES)
    assert cache(tmp_path).read() == replace(TRACES, failures={})


def test_sizes_or_an_optimizer_that_changed_without_the_source_are_noticed():
    plain = Traces(target="cpu", models={(): PLAIN}, updates={(): DEFAULT})
    assert agrees(plain, TRACES)
    assert not agrees(replace(plain, models={(): replace(PLAIN, alone=fit(piece(9000, 10)))}), TRACES)
    assert not agrees(replace(plain, updates={(): replace(DEFAULT, state_bytes=0.0)}), TRACES)


def test_another_task_target_or_space_has_traces_of_its_own(tmp_path):
    cache(tmp_path).write(TRACES)
    others = (
        {"facts": replace(FACTS, source_hash="abd")},
        {"target": "cuda"},
        {"batch_sizes": (4,)},
        {"trained": {"freeze": "head"}},
    )
    assert [cache(tmp_path, **changes).read() for changes in others] == [None] * 4
    assert cache(tmp_path, batch_sizes=(8, 4, 4)).read() is not None


def test_a_processor_with_other_arithmetic_has_traces_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    for target in ("cpu", "cuda"):
        cache(tmp_path, target=target).write(TRACES)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT")
    assert cache(tmp_path).read() is None
    assert cache(tmp_path, target="cuda").read() is not None  # what a GPU allocates does not depend on the processor


def test_a_broken_or_foreign_file_is_replaced(tmp_path):
    cache(tmp_path).write(TRACES)
    (file,) = (tmp_path / FOLDER).iterdir()
    for content in ("", "[]", '{"format": 99}', "\x00"):
        file.write_text(content)
        assert cache(tmp_path).read() is None
        cache(tmp_path).write(TRACES)
        assert Traces.from_dict(json.loads(file.read_text())).models == TRACES.models


def test_a_folder_that_cannot_be_written_costs_no_more_than_time(tmp_path):
    (tmp_path / FOLDER).write_text("a file")
    cache(tmp_path).write(TRACES)
    assert cache(tmp_path).read() is None


def test_beyond_so_many_files_or_bytes_the_oldest_go(tmp_path):
    files = [tmp_path / name for name in "abcd"]  # the newest first
    for file in files:
        file.write_bytes(b"x" * 10)
    drop_oldest(files, most_files=3, most_bytes=1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    drop_oldest(files, most_files=3, most_bytes=25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_calibration_that_is_kept_is_read_again_for_the_same_device_alone(tmp_path):
    CalibrationCache(tmp_path, MEASURED.of).write(MEASURED)
    assert CalibrationCache(tmp_path, dict(reversed(MEASURED.of.items()))).read() == MEASURED
    assert CalibrationCache(tmp_path, {**MEASURED.of, "threads": "2"}).read() is None


def test_a_broken_calibration_counts_as_none(tmp_path):
    cache = CalibrationCache(tmp_path, {})
    cache.path.parent.mkdir()
    for content in ("{", "[]", '{"rates": 3}'):
        cache.path.write_text(content)
        assert cache.read() is None


def test_a_calibration_in_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    CalibrationCache(tmp_path / "file", {}).write(MEASURED)


CARD = DeviceInfo(name="cuda:0", model="A100", total_bytes=2**30, free_bytes=2**30, driver="580", torch_version="2.13")
GUESS = Communicators(guess_bytes=512)


def test_what_communicators_were_seen_to_hold_is_kept_the_most_of_each_number(tmp_path):
    cache = CommunicatorCache(tmp_path, CARD, 4)
    assert cache.known(GUESS) == GUESS
    for number, num_bytes in ((3, 900), (1, 300), (1, 200), (1, 0)):
        cache.keep(number, num_bytes)
    known = CommunicatorCache(tmp_path, CARD, 4).known(GUESS)
    assert (known.guess_bytes, known.measured) == (512, ((1, 300), (3, 900)))


def test_other_processes_cards_drivers_or_variables_of_nccl_have_communicators_of_their_own(tmp_path, monkeypatch):
    CommunicatorCache(tmp_path, CARD, 4).keep(1, 300)
    others = [(replace(CARD, model="T4"), 4), (replace(CARD, driver="570"), 4), (CARD, 2)]
    assert [CommunicatorCache(tmp_path, *other).known(GUESS) for other in others] == [GUESS] * 3
    assert CommunicatorCache(tmp_path, replace(CARD, name="cuda:1"), 4).known(GUESS).is_measured(1)
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "4")
    assert CommunicatorCache(tmp_path, CARD, 4).known(GUESS) == GUESS


def test_a_broken_or_foreign_file_of_communicators_is_replaced(tmp_path):
    cache = CommunicatorCache(tmp_path, CARD, 4)
    cache.keep(1, 300)
    (file,) = (tmp_path / CALIBRATIONS).iterdir()
    foreign = file.read_text().replace("A100", "T4")
    for content in ("", "[]", foreign, '{"measured": [[1]]}', "\x00"):
        file.write_text(content)
        assert cache.known(GUESS) == GUESS
        assert cache.keep(1, 200).measured == ((1, 200),)
        assert cache.known(GUESS).measured == ((1, 200),)
