"""What a script has set in torch for its whole process is read there and set in another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.session import PROCESS_WIDE
from autotune.task import Task, load_task
from autotune.task.loading import load_source
from autotune.task.process_settings import apply_settings, end_switches, own_settings, read_settings, switching
from autotune.task.source import TaskSource

BY_OPERATOR = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch 2.9 and later
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
    "cuda.matmul.allow_fp16_reduced_precision_reduction": False,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
}
if hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"):
    OTHERS["cuda.matmul.allow_fp16_accumulation"] = True
READ = """
import json, sys, torch
from autotune.task.process_settings import apply_settings, read_settings
apply_settings(json.loads(sys.argv[1]))
exec(sys.argv[2])
print(json.dumps(read_settings()))
"""


def settings_of_a_process(given: dict[str, Any], code: str = "") -> dict[str, Any]:
    """What a process reads that was given settings, and has run some code since."""
    command = [sys.executable, "-c", READ, json.dumps(given), code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    """Each test begins without what a session before it has switched on, and leaves torch as it was."""
    PROCESS_WIDE.end()
    before = read_settings()
    yield
    apply_settings(before)
    assert read_settings() == before


def test_what_is_read_after_it_was_set_is_what_was_asked_for() -> None:
    before = read_settings()
    others = {name for name in before if not name.endswith("fp32_precision")}  # which follow from what is older
    assert others == OTHERS.keys() and not [name for name in OTHERS if before[name] == OTHERS[name]]
    apply_settings(json.loads(json.dumps(OTHERS)))
    assert {name: value for name, value in read_settings().items() if name in others} == OTHERS
    assert torch.zeros(()).dtype == torch.float64 and torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cuda.flash_sdp_enabled()


def test_what_was_not_read_stays_as_it_is() -> None:
    torch.set_float32_matmul_precision("medium")
    apply_settings({"cudnn.benchmark": True})
    assert torch.get_float32_matmul_precision() == "medium" and torch.backends.cudnn.benchmark


@pytest.mark.skipif(not BY_OPERATOR, reason="torch before 2.9 has none")
def test_what_was_set_for_a_kind_of_operator_travels_where_torch_refuses_to_tell_the_precision_of_all() -> None:
    code = "torch.backends.cuda.matmul.fp32_precision = 'tf32'; torch.backends.cudnn.rnn.fp32_precision = 'ieee'"
    found = settings_of_a_process({}, code)
    assert "float32_matmul_precision" not in found and "cudnn.allow_tf32" not in found and "cudnn.benchmark" in found
    assert (found["cuda.matmul.fp32_precision"], found["cudnn.rnn.fp32_precision"]) == ("tf32", "ieee")
    assert settings_of_a_process(found) == found


@pytest.mark.skipif(not BY_OPERATOR, reason="torch before 2.9 has none")
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_what_was_set_for_all_is_set_so_again(precision: str) -> None:
    found = settings_of_a_process({}, f"torch.set_float32_matmul_precision('{precision}')")
    assert found["float32_matmul_precision"] == precision
    assert settings_of_a_process(found) == found


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


def test_what_a_session_had_switched_before_it_failed_is_not_the_scripts_own() -> None:
    before = read_settings()

    def fails() -> None:
        with switching():
            torch.backends.cudnn.benchmark = True
            raise ValueError("it cannot be applied")

    with pytest.raises(ValueError, match="cannot be applied"):
        fails()
    assert read_settings()["cudnn.benchmark"] and own_settings() == before
    assert end_switches() == {} and own_settings()["cudnn.benchmark"]
