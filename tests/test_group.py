"""How the processes of a launched world find each other, and what they refuse before the first collective."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.devices.cpu import CpuDevice
from autotune.errors import ConfigError, DeviceError
from autotune.group import launched_world, require_own_device
from autotune.records.config import ALONE, World
from tests.worlds import Ranks

FOUND = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (("RANK",), r"lacks RANK \(which of them this one is, from 0 on\)"),
        (
            ("MASTER_ADDR", "MASTER_PORT"),
            r"lacks MASTER_ADDR \(the machine of rank 0, .*\) and MASTER_PORT \(a free port",
        ),
    ],
)
def test_what_processes_lack_to_find_each_other_is_named_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], said: str
) -> None:
    for name in FOUND.keys() - {*missing}:
        monkeypatch.setenv(name, FOUND[name])
    with pytest.raises(
        ConfigError, match=rf"WORLD_SIZE=2 .*{said}.*; launch the script with torchrun, .*or unset WORLD_SIZE"
    ):
        launched_world()


def test_the_world_is_the_launchers_or_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched_world() == ALONE
    for name, value in FOUND.items():
        monkeypatch.setenv(name, value)
    assert launched_world() == World(size=2, rank=1)


class Gpu(CpuDevice):
    """A GPU as `require_own_device` knows it."""

    def __init__(self, hardware_id: str) -> None:
        super().__init__()
        self.name, self._hardware_id = "cuda:0", hardware_id

    def hardware_id(self) -> str:
        return self._hardware_id


def taken(world: World, hardware_ids: tuple[str, ...]) -> str:
    try:
        require_own_device(world, Gpu(hardware_ids[world.rank]))
    except DeviceError as error:
        return str(error)
    return ""


def test_two_ranks_on_one_gpu_are_told_of_in_all() -> None:
    """Each sees its own GPU as `cuda:0`, as under Slurm, so that only the UUID tells them apart."""
    with Ranks(3) as ranks:
        assert ranks.run(taken, ("a", "b", "c")) == ["", "", ""]
        assert ranks.run(taken, ("", "", "")) == ["", "", ""], "processes on a CPU share it"
        first, *others = ranks.run(taken, ("a", "b", "a"))
    assert re.match(
        r"ranks 0 and 2 have taken one GPU, cuda:0 of .* \(a\), and each needs its own; start as many", first
    )
    assert others == [first, first]


HOLDS_THE_LOCK = """
import sys
from pathlib import Path
import torch
from torch import distributed
from autotune.group import join
from autotune.records.config import World

join(World(size=2, rank=int(sys.argv[1])), torch.device("cpu"), Path("store").absolute())
distributed.all_reduce(torch.ones(10))
sys.setswitchinterval(100)  # so that Gloo's thread gets the lock only where this one gives it away
distributed.all_reduce(torch.ones(10), async_op=True)  # nothing else holds the tensor: the thread frees it
sum(range(3_000_000))
"""


def test_a_thread_that_still_frees_what_was_sent_does_not_abort_the_process(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", HOLDS_THE_LOCK, str(rank)] for rank in range(2)]
    started = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        ended = [(process.communicate(timeout=60)[1], process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [code for _, code in ended] == [0, 0], ended
