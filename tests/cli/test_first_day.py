"""What goes wrong on the first day says what to do next. What a model file may return: `test_bad_input.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

import autotune
from autotune.cli import main
from autotune.errors import TaskError
from autotune.runners.local import LocalRunner
from autotune.study.place import lock_study, place_of
from autotune.task.source import TaskSource

TINY = (Path(__file__).parent.parent / "models" / "tiny.py").read_text()
SEARCH = ("search", "model.py", "--device", "cpu", "--budget", "1m")
# root writes anywhere unless it gives this up
UNPRIVILEGED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(TINY)
    return tmp_path


@pytest.fixture
def read_only(folder: Path) -> Iterator[Path]:
    """The working directory, where nothing can be written."""
    if UNPRIVILEGED and shutil.which("setpriv") is None:
        pytest.skip("root writes everywhere, and there is no setpriv")
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def refused_without_privileges(*arguments: str) -> str:
    command = [*UNPRIVILEGED, sys.executable, "-m", "autotune", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow  # `task/test_loading.py` holds it for the import
def test_no_model_function(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.py").write_text(TINY.replace("def build_model", "def create_model"))
    said = refused(*SEARCH, capsys=capsys)
    assert "build_model" in said and "create_model" in said


def test_a_model_function_that_returns_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.py").write_text(TINY.replace("return nn.Sequential(*", "_ = nn.Sequential(*"))
    assert "build_model returned None; expected a torch.nn.Module: is `return model` missing?" in refused(
        *SEARCH, capsys=capsys
    )


def test_a_gpu_that_is_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = refused("search", "model.py", "--device", "cuda", capsys=capsys)
    assert "there is no device 'cuda': " in said and "use --device cpu to train on the CPU" in said


def test_a_torch_without_cuda_beside_a_gpu(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.devices._num_gpus", lambda: 1)
    monkeypatch.setattr("autotune.devices.torch_has_cuda", lambda: False)
    said = refused("search", "model.py", "--device", "cuda", capsys=capsys)
    assert "was built without CUDA; install a CUDA build (https://pytorch.org" in said


def test_a_driver_that_is_too_old(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune.devices import instruments, nvml

    why = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
    monkeypatch.setattr("autotune.devices.ask_torch", lambda: instruments.Answer(why=why))
    monkeypatch.setattr("autotune.devices._num_gpus", lambda: 0)
    monkeypatch.setattr("autotune.devices.torch_has_cuda", lambda: True)
    monkeypatch.setattr("autotune.devices.is_there_a_sign_of_a_gpu", lambda: True)
    monkeypatch.setattr(nvml, "connect", lambda: "NVML is missing")
    said = refused("search", "model.py", "--device", "cuda", capsys=capsys)
    assert "too old (found version 11040). Please update your GPU driver" in said and "--device cpu" in said


def test_too_little_host_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(*SEARCH, "--memory-limit", "100MiB", capsys=capsys)
    assert "100 MiB" in said and "raise --memory-limit" in said


@pytest.mark.parametrize("command", [SEARCH, ("probe", "model.py", "--config", "{}")])
def test_a_folder_that_is_read_only(command: tuple[str, ...], read_only: Path) -> None:
    said = refused_without_privileges(*command)
    assert "Permission denied" in said and ("--storage" in said or "a folder that may be written to" in said)
    assert [path.name for path in read_only.iterdir()] == ["model.py"]


def test_a_study_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.report.sample_study import write_study

    if UNPRIVILEGED and shutil.which("setpriv") is None:
        pytest.skip("root writes everywhere, and there is no setpriv")
    study = write_study(folder / "mine.db")
    study.chmod(0o444)
    said = refused_without_privileges(*SEARCH, "--storage", "mine.db")
    assert "mine.db" in said and "--storage" in said
    show = [*UNPRIVILEGED, sys.executable, "-m", "autotune", "show", "mine.db"]
    assert "Faster" in subprocess.run(show, capture_output=True, text=True, check=True).stdout


def test_another_search_of_the_same_study(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_study(place_of(None, None, folder.name)):
        said = refused(*SEARCH, capsys=capsys)
    assert "in use by another search" in said and "--study NAME" in said and "--storage postgresql" in said


def test_a_dataset_that_cannot_be_pickled() -> None:
    lock = threading.Lock()
    task = autotune.Task(build_model=nn.Identity, train_dataset=lambda: [lock])  # type: ignore[arg-type]
    with pytest.raises(
        TaskError, match=r"cannot be sent to another process \(.*build models, datasets and files inside"
    ):
        autotune.search(task, budget="5s")


def test_a_model_on_the_gpu_at_import(folder: Path) -> None:
    """Which is no error: each probe starts a new interpreter. That takes seconds, and the remedy is told."""
    (folder / "model.py").write_text(TINY + "\ntorch.cuda.is_initialized = lambda: True\n")
    with LocalRunner(TaskSource.of("model.py"), device="cpu", logs=folder) as runner:
        (told,) = runner.notes
    assert told.endswith("importing the model file initialised CUDA; build and move models inside build_model")
