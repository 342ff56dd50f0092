"""Kernels that oneDNN compiles for a shape that it has not seen: the count of a trace, against oneDNN's own log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune import techniques
from autotune.predict.tracing import Tracer
from autotune.task import load_task

ROOT = Path(__file__).parent.parent.parent
STUDIES = {"transformer": "wordy", "convolutional": "digits"}
SIZES = (2, 5, 7)

# A micro batch of each size, the last one with oneDNN's log.
TRAIN = """
import sys
from dataclasses import replace
import torch
from autotune import techniques
from autotune.task.batches import StepBatch
from autotune.devices.cpu import CpuDevice
from autotune.session import prepare
from autotune.task import load_task

file, amp, *sizes = sys.argv[1:]
task = replace(load_task(file), global_batch=None)
session = prepare(task, techniques.complete({"amp": amp}), device=CpuDevice())
*first, last = [StepBatch([task.batch(int(size))]) for size in sizes]
for batch in first:
    session.accumulate(batch)
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
    session.accumulate(last)
"""


@pytest.mark.parametrize("kind", STUDIES)
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_as_many_kernels_are_foretold_as_are_compiled(kind: str, amp: str) -> None:
    file = ROOT / "studies" / STUDIES[kind] / "model.py"
    arguments = [str(file), amp, *map(str, SIZES)]
    log = subprocess.run(
        [sys.executable, "-c", TRAIN, *arguments], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    created = [line.split(",") for line in log.splitlines() if "create:cache_miss" in line]
    compiled = sum(fields[fields.index("cpu") + 1] in ("matmul", "convolution") for fields in created)
    micro = Tracer(load_task(file), "cpu").micro_steps(techniques.complete({"amp": amp}), SIZES)
    assert micro.new_kernels == compiled


def test_a_gpu_compiles_none() -> None:
    task = load_task(ROOT / "studies" / "wordy" / "model.py")
    assert Tracer(task, "cuda").micro_steps(techniques.complete({"amp": "bf16"}), SIZES).new_kernels == 0
