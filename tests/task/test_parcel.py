"""What travels with a task: the code's own files, and what the code names; nothing of it is run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from autotune.errors import TaskError
from autotune.task import parcel as parcels
from autotune.task.loading import load_source
from autotune.task.parcel import pack
from autotune.task.source import TaskSource
from autotune.task.task import Task

MODEL = """
import os
from pathlib import Path

import json, torch
from blocks.linear import WIDTH, net
import missing_here.entirely

DATA = "{data}"
SHAPES = Path(__file__).parent / "shapes.json"
TIMES = int(os.environ.get("PARCEL_TIMES", "1"))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file with a package without `__init__.py`, a file beside it, data, and much that it does not name."""
    project = tmp_path / "project"
    (project / "blocks").mkdir(parents=True)
    (project / "blocks" / "linear.py").write_text("from .depth import *\nfrom . import width\n")
    (project / "blocks" / "depth.py").write_text("import helpers\n")
    (project / "blocks" / "width.py").write_text("")
    (project / "helpers.py").write_text("raise RuntimeError('not to be run here')")
    (project / "shapes.json").write_text("[1]")
    (project / "unrelated.py").write_text("")
    (tmp_path / "data").mkdir()
    file = project / "model.py"
    file.write_text(MODEL.format(data=tmp_path / "data"))
    return file


def test_the_model_file_its_modules_and_the_files_beside_it_that_it_names_are_packed(model: Path) -> None:
    names = {str(Path(path).relative_to(model.parent)) for path in pack(TaskSource.of(model)).files}
    assert names == {"model.py", "blocks/linear.py", "blocks/depth.py", "blocks/width.py", "helpers.py", "shapes.json"}


def test_variables_that_the_code_names_go_with_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not pack(TaskSource.of(model)).environment
    monkeypatch.setenv("PARCEL_TIMES", "3")
    packed = pack(TaskSource.of(model))
    assert packed.environment == {"PARCEL_TIMES": "3"}
    assert packed.describe().startswith("model.py, ") and packed.describe().endswith(
        "and PARCEL_TIMES of the environment"
    )


def test_variables_of_one_machine_or_process_stay_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CUDA_VISIBLE_DEVICES", "HOME", "PATH", "TMPDIR", "LOCAL_RANK", "MASTER_ADDR")
    model.write_text(f"NAMES = {[*names, 'PARCEL_TIMES']!r}")
    for name in (*names, "PARCEL_TIMES"):
        monkeypatch.setenv(name, "3")
    assert pack(TaskSource.of(model)).environment == {"PARCEL_TIMES": "3"}


def test_a_text_that_is_too_long_for_a_name_is_no_file(model: Path) -> None:
    texts = ["a long prompt. " * 400, "x" * 300 + ".txt"]
    model.write_text(model.read_text() + f"TEXTS = {texts!r}")
    assert str(model.parent / "shapes.json") in pack(TaskSource.of(model)).files


def test_data_has_to_be_on_each_machine(model: Path, tmp_path: Path) -> None:
    packed = pack(TaskSource.of(model))
    assert packed.needed == (str(tmp_path / "data"),) and not packed.missing()
    (tmp_path / "data").rmdir()
    assert packed.missing() == [str(tmp_path / "data")]


def test_where_the_same_files_are_there_they_are_used_in_place(model: Path, tmp_path: Path) -> None:
    source = TaskSource.of(model)
    assert pack(source).unpack(tmp_path / "there") == source


def test_elsewhere_they_are_laid_out_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "net.py").write_text("import torch\ndef net():\n    return torch.nn.Linear(2, 2)\n")
    code = "import torch\nfrom net import net as build_model\ndef make_batch(n):\n    return torch.ones(n, 2)\n"
    (project / "model.py").write_text(code)
    packed = pack(TaskSource.of(project / "model.py"))
    for file in project.iterdir():
        file.unlink()
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = load_source(packed.unpack(tmp_path / "there"))
    assert isinstance(task.build_model(), torch.nn.Linear)
    assert task.build_model.__code__.co_filename == f"{tmp_path}/there{project}/net.py"


def test_a_task_built_in_python_travels_as_it_is(tmp_path: Path) -> None:
    packed = pack(TaskSource.of(Task(build_model=lambda: torch.nn.Linear(3, 1), make_batch=torch.ones, name="own")))
    assert packed.source.live is None
    task = load_source(packed.unpack(tmp_path))
    assert task.name == "own" and task.build_model().in_features == 3


def test_what_is_too_large_to_be_sent_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "MOST_BYTES", 100)
    with pytest.raises(TaskError, match=r"model\.py cannot be sent to other machines: it is .*, most of it model\.py"):
        pack(TaskSource.of(model))
