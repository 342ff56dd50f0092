"""A supervisor may start before anybody knows which task it is for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from autotune.devices.slots import find_slots
from autotune.errors import TaskError
from autotune.runners.local import LocalRunner
from autotune.runners.slots import SlotsRunner
from autotune.runners.start import held_ahead_bytes, started_ahead
from autotune.task.source import TaskSource

MODEL = """
import torch

print("of the module")


def build_model():
    return torch.nn.Linear(4, 2)


def make_batch(size):
    return torch.randn(size, 4), torch.randint(2, (size,))
"""


@pytest.fixture
def source(tmp_path: Path) -> TaskSource:
    (tmp_path / "net.py").write_text(MODEL)
    return TaskSource.of(tmp_path / "net.py")


def supervisors() -> list[int]:
    """The supervisors that this process has started: each leads a session. One that has just begun may have no command line yet."""
    return [one.pid for one in psutil.Process().children() if os.getsid(one.pid) == one.pid]


def begin_and_end(source: TaskSource, folder: Path, is_ahead: bool) -> None:
    with (
        started_ahead() if is_ahead else contextlib.nullcontext(),
        LocalRunner(source, device="cpu", logs=folder / "logs"),
    ):
        pass


def let_python_begin_with(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "begins").mkdir()
    (folder / "begins" / "sitecustomize.py").write_text(code)
    package = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "begins"), package]))


def test_it_starts_on_pythons_that_lack_a_file_in_memory(
    tmp_path: Path, source: TaskSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of uv and conda are built for an old glibc."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with LocalRunner(source, device="cpu", logs=tmp_path):
        assert supervisors()


def test_one_that_cannot_start_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError), started_ahead():
        pass
    assert os.listdir("/proc/self/fd") == before


def test_the_first_runner_takes_the_one_that_was_started_ahead(tmp_path: Path, source: TaskSource) -> None:
    with started_ahead():
        [ahead] = supervisors()
        with LocalRunner(source, device="cpu", logs=tmp_path / "logs") as runner:
            assert supervisors() == [ahead]
            assert runner.stated.model.endswith("net.py")
            with LocalRunner(source, device="cpu", logs=tmp_path / "more logs"):
                assert len(supervisors()) == 2
    assert not supervisors()


def test_one_that_nobody_takes_ends_with_the_block() -> None:
    with started_ahead():
        assert supervisors()
    assert not supervisors()


def test_one_of_another_environment_ends_as_the_first_runner_starts_its_own(
    tmp_path: Path, source: TaskSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started_ahead():
        ahead = supervisors()
        monkeypatch.setenv("SOMETHING", "that a probe could depend on")
        with LocalRunner(source, device="cpu", logs=tmp_path):
            assert len(supervisors()) == 1 and supervisors() != ahead
            assert held_ahead_bytes() == 0
        assert not supervisors()


def test_one_ends_as_slots_start_their_own(tmp_path: Path, source: TaskSource) -> None:
    """Each of them runs on processors of its own."""
    slots = find_slots("2", "cpu")
    with started_ahead():
        ahead = supervisors()
        with SlotsRunner(source, slots, logs=tmp_path):
            assert len(supervisors()) == 2 and not {*supervisors()} & {*ahead}
        assert not supervisors()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_log_begins_with_what_was_printed_before_the_task_was_known(
    tmp_path: Path, source: TaskSource, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    let_python_begin_with("print('of the interpreter')", tmp_path, monkeypatch)
    begin_and_end(source, tmp_path, is_ahead)
    assert (tmp_path / "logs" / "import.log").read_text() == "of the interpreter\nof the module\n"


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_torch_that_cannot_be_imported_is_told_with_its_error(
    tmp_path: Path, source: TaskSource, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    let_python_begin_with("import sys; sys.modules['torch'] = None", tmp_path, monkeypatch)
    with pytest.raises(TaskError) as raised:
        begin_and_end(source, tmp_path, is_ahead)
    assert "import of torch halted" in raised.value.frames
    assert not supervisors()


def test_the_folder_of_a_search_may_have_a_name_that_is_no_text(
    tmp_path: Path, source: TaskSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    with LocalRunner(source, device="cpu", logs=tmp_path / "logs"):
        assert os.listdir(folder)
    assert not os.listdir(folder)


def test_its_memory_counts_as_free_until_it_is_taken(tmp_path: Path, source: TaskSource) -> None:
    assert held_ahead_bytes() == 0
    with started_ahead():
        deadline = time.monotonic() + 60
        while held_ahead_bytes() < 50 * 2**20 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert held_ahead_bytes() >= 50 * 2**20
        with LocalRunner(source, device="cpu", logs=tmp_path):
            assert held_ahead_bytes() == 0


HANGS = """
import pathlib, time
pathlib.Path(r"{folder}/importing").touch()
time.sleep(3600)
"""
SEARCH = """
import pathlib, sys
from autotune.runners.local import LocalRunner
from autotune.runners.start import started_ahead
from autotune.task.source import TaskSource

folder = pathlib.Path(sys.argv[1])
with started_ahead(), LocalRunner(TaskSource.of(folder / "net.py"), device="cpu", logs=folder / "logs"):
    pass
"""


def test_a_search_that_dies_while_torch_is_imported_leaves_nothing(tmp_path: Path, source: TaskSource) -> None:
    (tmp_path / "slow" / "torch").mkdir(parents=True)
    (tmp_path / "slow" / "torch" / "__init__.py").write_text(HANGS.format(folder=tmp_path))
    (tmp_path / "tmp").mkdir()
    paths = os.pathsep.join([str(tmp_path / "slow"), str(Path(__file__).parents[2])])
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": paths}
    search = subprocess.Popen([sys.executable, "-c", SEARCH, str(tmp_path)], env=environment)
    while not ((tmp_path / "importing").exists() and list((tmp_path / "tmp").glob("autotune-*"))):
        time.sleep(0.02)
    time.sleep(0.2)  # the greeting has been sent
    running = psutil.Process(search.pid).children(recursive=True)
    assert running
    search.kill()
    search.wait()
    assert not psutil.wait_procs(running, timeout=5)[1]
    assert not list((tmp_path / "tmp").glob("autotune-*"))
