"""Launched scripts, as each peer's documentation has them, are tuned by at most five changed lines, and train on in all processes."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations import launched_scripts as scripts
from tests.integrations.launched_scripts import replaced
from tests.integrations.test_scripts import MAX_CHANGED
from tests.short_play_off import SHORTEN

pytestmark = pytest.mark.usefixtures("measured_once")

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", "1", "1"]
# Accelerate shards on GPUs alone: see tests/gpu/test_integrations.py
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "train.py", "--cpu"]

# A thread of gloo destroys what was summed while it holds a lock of its group and waits for the interpreter's. Where the group is destroyed
# in these milliseconds, torch 2.13 waits for ever, in these examples as in any script whose last step is so short.
LINGER = """
import time
from torch import distributed

def linger(*given, destroy=distributed.destroy_process_group):
    time.sleep(0.1)
    destroy(*given)

distributed.destroy_process_group = linger
"""


def run(script: str, edits: dict[str, str], command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The launched script with its edits, which are few."""
    tuned = replaced(script, edits)
    changed = [line for line in difflib.ndiff(script.splitlines(), tuned.splitlines()) if line.startswith("+ ")]
    assert len(changed) <= MAX_CHANGED
    (folder / "train.py").write_text(f"{SHORTEN}\n{LINGER}\n{tuned}")
    known = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=known, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "tells why" in done.stderr, done.stdout + done.stderr
    assert list((folder / "studies").glob("*.db"))
    return done


@pytest.mark.timeout(300)
def test_the_tutorial_of_torchrun(tmp_path: Path) -> None:
    """2048 samples, 32 a process as before."""
    (tmp_path / "datautils.py").write_text(scripts.TORCHRUN_DATA)
    script = replaced(scripts.TORCHRUN, scripts.TORCHRUN_ON_CPU)
    done = run(script, scripts.TORCHRUN_TUNED, TORCHRUN, tmp_path)
    trained = [f"[GPU{rank}] Epoch 0 | Batchsize: 32 | Steps: 32" for rank in range(2)]
    # not as lines: two processes that print at once write both texts, then both ends of their lines
    assert all(text in done.stdout for text in (*trained, "Epoch 0 | Training snapshot saved at snapshot.pt")), (
        done.stdout
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    done = run(scripts.ACCELERATE, scripts.ACCELERATE_TUNED, ACCELERATE, tmp_path)
    assert "epoch 0: 8 steps of 32, DistributedDataParallel" in done.stdout.splitlines()
