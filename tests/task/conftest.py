import textwrap

import pytest
import torch

from autotune.task import load_task

torch.set_num_threads(1)

MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Linear(4, 3)

def make_batch(batch_size):
    return torch.randn(batch_size, 4), torch.randint(3, (batch_size,))
"""


@pytest.fixture
def write(tmp_path):
    """Writes a model file: a whole one, or further lines for a small valid one."""

    def write(text="", *, whole=False, name="model.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(("" if whole else MODEL) + textwrap.dedent(text), encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(write):
    """Writes a model file and loads its task."""
    return lambda *args, **options: load_task(write(*args, **options))
