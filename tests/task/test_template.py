import re

import pytest
import torch

from autotune.errors import TaskError
from autotune.task import load_task
from autotune.task.facts import check_task
from autotune.task.model_file import CONSTANTS, SIGNATURES
from autotune.task.template import write_template


def test_the_template_runs_as_it_is(tmp_path):
    write_template(tmp_path / "model.py")
    check_task(load_task(tmp_path / "model.py"), torch.device("cpu"))


@pytest.mark.parametrize("left_out", [("train_step",), ("training_step", "loss_weight", "max_grad_norm")])
def test_the_template_runs_with_everything_in_it_switched_on(tmp_path, left_out):
    path = tmp_path / "model.py"
    write_template(path)
    text = re.sub(r"^# (?=def |    |[A-Z_]+ = )", "", path.read_text(), flags=re.MULTILINE)
    for name in left_out:
        text = re.sub(rf"^(def )?{name}\b", r"\1_unused", text, flags=re.MULTILINE | re.IGNORECASE)
    path.write_text(text)
    task = load_task(path)
    assert [name for name in (*SIGNATURES, *map(str.lower, CONSTANTS)) if getattr(task, name) is None] == list(left_out)
    check_task(task, torch.device("cpu"))


def test_a_file_that_exists_is_left_as_it_is(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("mine")
    with pytest.raises(TaskError, match=r"exists already.*choose another name"):
        write_template(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(("name", "expected"), [("", "is a folder"), ("model.txt", ".py"), ("no/model.py", "folder")])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, name, expected):
    with pytest.raises(TaskError, match=expected):
        write_template(tmp_path / name)
