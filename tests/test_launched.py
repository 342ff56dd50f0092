"""`autotune.prepare` in a script that `torchrun` starts: each process is a rank of the world that was launched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.records.config import ALONE
from autotune.session import prepare

MODEL = """
import torch
from torch import nn

GLOBAL_BATCH = 16


def build_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=draw), torch.randint(4, (), generator=draw)


def train_dataset():
    return Points()
"""
SCRIPT = """
import json, sys
import autotune
from torch import distributed

session = autotune.prepare("model.py", {"batch_size": 4, "parallel": sys.argv[1]})
losses = [float(session.step(batch)) for _ in range(2) for batch in session.loader]
found = [session.world.rank, session.world.size, losses, session.evaluate(session.task.dataset(), batch_size=4)]
with open(f"{session.world.rank}.json", "w") as told:
    json.dump(found, told)
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("parallel", ["fsdp"])
def test_a_launched_script_trains_as_one_process_does(tmp_path: Path, parallel: str) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "train.py", parallel], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    alone = prepare(str(tmp_path / "model.py"), {"batch_size": 16}, device="cpu", world=ALONE)
    losses = [float(alone.step(batch)) for _ in range(2) for batch in alone.loader]
    found = alone.evaluate(alone.task.dataset(), batch_size=4)
    for rank, (number, size, own, evaluated) in enumerate(told):
        assert (number, size) == (rank, 2)
        assert own == pytest.approx(losses, abs=1e-5)  # a step takes all sixteen samples, in whatever order
        assert evaluated == pytest.approx(found, abs=1e-5)
