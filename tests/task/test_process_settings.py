"""What a script has set in torch for its whole process is read there and set in another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autotune.task import Task, load_task
from autotune.task.loading import load_source
from autotune.task.process_settings import apply_settings, read_settings
from autotune.task.source import TaskSource

OTHERS = {
    "default_dtype": "float64",
    "deterministic": 1,
    "float32_matmul_precision": "high",
    "cudnn.allow_tf32": False,
    "cudnn.benchmark": True,
    "cudnn.deterministic": True,
    "flash_attention": False,
    "memory_efficient_attention": False,
    "plain_attention": False,
    "cudnn_attention": False,
}
SET_BY_BACKEND = """
import json, torch
from autotune.task.process_settings import apply_settings, read_settings
torch.backends.cuda.matmul.fp32_precision = "tf32"
found = read_settings()
apply_settings(found)
print(json.dumps(found), torch.backends.cuda.matmul.fp32_precision)
"""


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """Each test leaves torch as it was."""
    before = read_settings()
    yield
    apply_settings(before)
    assert read_settings() == before


def test_what_is_read_after_it_was_set_is_what_was_asked_for() -> None:
    before = read_settings()
    assert before.keys() == OTHERS.keys() and not [name for name in OTHERS if before[name] == OTHERS[name]]
    apply_settings(json.loads(json.dumps(OTHERS)))
    assert read_settings() == OTHERS
    assert torch.zeros(()).dtype == torch.float64 and torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cuda.flash_sdp_enabled()


def test_what_was_not_read_stays_as_it_is() -> None:
    torch.set_float32_matmul_precision("medium")
    apply_settings({"cudnn.benchmark": True})
    assert torch.get_float32_matmul_precision() == "medium" and torch.backends.cudnn.benchmark


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9 has none")
def test_a_setting_that_torch_refuses_to_tell_is_left_out() -> None:
    done = subprocess.run([sys.executable, "-c", SET_BY_BACKEND], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, precision = done.stdout.rsplit(" ", 1)
    assert "float32_matmul_precision" not in json.loads(told) and "cudnn.benchmark" in json.loads(told)
    assert precision.strip() == "tf32"


def test_a_task_built_in_python_brings_its_scripts_settings_to_another_process(tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    source = TaskSource.of(Task(build_model=torch.nn.Identity, make_batch=torch.zeros)).hand_over(tmp_path)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    load_source(TaskSource.from_dict(json.loads(json.dumps(source.to_dict()))))
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.benchmark


def test_a_model_file_says_itself_what_it_sets(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\n\n\ndef build_model():\n    return torch.nn.Linear(2, 2)\n\n\nmake_batch = torch.rand\n"
    )
    torch.set_float32_matmul_precision("high")
    source = TaskSource.of(load_task(tmp_path / "model.py"))
    assert source.settings == {}
    torch.set_float32_matmul_precision("highest")
    load_source(source)
    assert torch.get_float32_matmul_precision() == "highest"
