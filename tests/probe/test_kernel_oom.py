"""The kernel's own out-of-memory killer, in a real control group: what it kills is out of memory, and nothing else is."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.room import limit_bytes

HUNGRY = """
import torch
from torch import nn

KEPT = []


def build_model():
    return nn.Linear(64, 64)


def make_batch(batch_size):
    return torch.randn(batch_size, 64), torch.randn(batch_size, 64)


def training_step(model, batch):
    while len(batch[0]) > 8:
        KEPT.append(torch.ones(4 * 2**20))
    return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def own_folder(controller):
    """Where this process's control group lies, in version 1 (`memory`) or 2 (empty)."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if names == controller:
            return Path("/sys/fs/cgroup") / controller / path.lstrip("/")
    return None


@pytest.fixture
def small_group():
    """A control group with little room for training; returns the file that processes join by."""
    for controller, limit_file, join_file in (
        ("memory", "memory.limit_in_bytes", "tasks"),
        ("", "memory.max", "cgroup.procs"),
    ):
        folder = own_folder(controller)
        if folder is None:
            continue
        group = folder / f"autotune-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit_file).write_text(str(limit_bytes(380)))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        yield group / join_file
        with contextlib.suppress(OSError):
            group.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


def probe_in(join_file, folder, *options):
    (folder / "hungry.py").write_text(HUNGRY)
    command = [sys.executable, "-m", "autotune", "probe", "hungry.py", "--device", "cpu", "--json", *options]

    def join():
        join_file.write_text(str(os.getpid()))

    done = subprocess.run(
        [*command, "--config", '{"batch_size": 16}'], cwd=folder, capture_output=True, text=True, preexec_fn=join
    )
    return json.loads(done.stdout)


def test_a_probe_that_the_kernel_kills_for_memory_is_out_of_memory(small_group, tmp_path):
    outcome = probe_in(small_group, tmp_path, "--memory-limit", "8GiB")
    assert outcome["kind"] == "oom"
    assert "kernel" in outcome["cause"]


def test_the_default_limit_is_the_control_groups_so_that_the_kernel_need_not_kill(small_group, tmp_path):
    outcome = probe_in(small_group, tmp_path)
    assert outcome["kind"] == "oom"
    assert "DefaultCPUAllocator" in outcome["detail"]
