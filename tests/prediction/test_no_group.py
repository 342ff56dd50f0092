"""A torch that was built without `torch.distributed` trains and predicts in one process, and says why it does not in several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TRAIN_AND_PREDICT = """
import sys
import tests.without_groups
from torch import distributed
import autotune
from autotune.errors import ConfigError
from autotune.prediction.job import trace_plan
from autotune.prediction.traces import plan_traces
from autotune.probe.checks import run_checks
from autotune.devices import open_device
from autotune.records.config import ALONE, World
from autotune.techniques import find_techniques

assert not distributed.is_available()
task, techniques = autotune.load_task(sys.argv[1]), find_techniques()
session = autotune.prepare(task, {"batch_size": 16}, device="cpu")
session.step(next(iter(session.loader)))
config = techniques.complete({"batch_size": 16, "accumulation_steps": 3})
assert run_checks(task, config.as_dict(), open_device("cpu"), batch_size=8, world=ALONE).passed
told = list(trace_plan(task, plan_traces([config], techniques), "cuda 8.0 108"))
assert not [message for message in told if message.get("traces", {}).get("failures")], told
try:
    autotune.prepare(task, {"batch_size": 8}, device="cpu", world=World(size=2))
except ConfigError as error:
    print(error)
"""


def test_a_torch_without_groups_trains_and_predicts_in_one_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_AND_PREDICT, ROOT / "tests" / "models" / "tiny.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "a world of 2 processes was asked for" in done.stdout and "without torch.distributed" in done.stdout
