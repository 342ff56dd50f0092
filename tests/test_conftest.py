"""Tests see nothing of the user's: what a search, a project or a variable has left beside the checkout changes none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.files import read_project

ROOT = Path(__file__).parents[1]
PROJECT = "[tool.autotune]\nbudget = '1s'\ndevice = 'cuda'\n"


@pytest.fixture(scope="module")
def folder_of_the_module() -> Path:
    return Path.cwd()


def test_a_test_begins_in_an_empty_folder_outside_the_checkout(folder_of_the_module: Path) -> None:
    for folder in (Path.cwd(), folder_of_the_module):
        assert ROOT not in (folder, *folder.parents) and not list(folder.iterdir())
    assert Path.cwd() != folder_of_the_module
    Path("studies").mkdir()


def test_the_next_one_finds_nothing_of_the_one_before() -> None:
    assert not list(Path.cwd().iterdir())


def test_no_project_above_it_asks_for_anything() -> None:
    assert not read_project(Path.cwd()).options


def test_what_a_user_has_left_and_set_is_seen_by_no_test(tmp_path: Path) -> None:
    """The tests run where a search has been, below a project with options, with a launcher's and a shell's variables."""
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "gpt.db").write_bytes(b"")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    variables = {"AUTOTUNE_PROBE": "1", "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "fp16", "COLUMNS": "20"}
    inner = tmp_path / "test_inner.py"
    inner.write_text(
        "import os\n"
        "import pytest\n"
        "from tests.conftest import *\n"
        "from autotune.cli.files import read_project\n"
        "from autotune.study.reading import load_study\n"
        "from autotune.errors import StudyError\n"
        "from pathlib import Path\n"
        "def test_it():\n"
        "    with pytest.raises(StudyError, match='makes one in'):\n"
        "        load_study('gpt')\n"
        "    assert not read_project(Path.cwd()).options\n"
        f"    assert not set(os.environ) & {set(variables)}\n"
    )
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(inner)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
