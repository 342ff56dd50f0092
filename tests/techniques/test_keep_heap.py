"""`keep_heap`: freed memory stays with the process."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest

from autotune.techniques.keep_heap import KeepHeap

from .gpus import GPU
from .kinds import KINDS

# What a step does with its activations: they are taken, and all are freed. Blocks of more than 32 MiB are never kept otherwise.
STEPS = """
import resource
import torch
from torch import nn
import autotune
from autotune.techniques import find_techniques

techniques = find_techniques()
task = autotune.Task(build_model=lambda: nn.Linear(4, 4), make_batch=lambda n: (torch.randn(n, 4), torch.randint(4, (n,))))


def faults_of_steps(mebibytes=48, count=3):
    for _ in range(3):
        kept = [torch.empty(mebibytes * 2**18).fill_(1.0) for _ in range(count)]
        del kept
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        kept = [torch.empty(mebibytes * 2**18).fill_(1.0) for _ in range(count)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


plain = faults_of_steps()
with techniques.keep_settings():
    autotune.prepare(task, {"keep_heap": True}, device="cpu")
    kept = faults_of_steps()
print(plain, kept, faults_of_steps(384, 1))  # a block that does not fit into what was kept
"""


def test_steps_take_no_memory_from_the_system_and_do_so_again_once_it_is_restored() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    plain, kept, restored = map(int, done.stdout.split())
    page_bytes = resource.getpagesize()
    assert plain > 10 * 3 * 48 * 2**20 / page_bytes / 2
    assert kept < 10 * 3 * 48 * 2**20 / page_bytes / 20
    assert restored > 10 * 384 * 2**20 / page_bytes / 2


def test_it_applies_to_cpus_whose_malloc_nobody_else_has_set(
    make_setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = make_setting(KINDS["residual"]())
    assert KeepHeap().support(setting).choices == (False, True)
    assert "memory of its own" in KeepHeap().support(make_setting(KINDS["residual"](), device=GPU)).reason
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert "MALLOC_TRIM_THRESHOLD_" in KeepHeap().support(setting).reason
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert "glibc" in KeepHeap().support(setting).reason
