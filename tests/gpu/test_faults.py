"""What a search says and leaves behind when a GPU, its driver or its neighbours fail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.units import MIB
from tests.driver.cards import A100, H100_SLICE, LAPTOP, Card
from tests.driver.played import Played
from tests.driver.run import variables

pytestmark = [pytest.mark.gpu, pytest.mark.played]
MODEL = """
import torch
from torch import nn

GLOBAL_BATCH = 32
BASELINE = {"batch_size": 32}


def build_model():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 1000), nn.Linear(1000, 10))


def make_batch(n):
    return torch.randn(n, 3, 32, 32), torch.randint(10, (n,))


def training_step(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens, and what the search ends with.

    Attributes:
        settings: of the driver, for each process's whole life.
        stage: changes the played cards before the search begins; `later` once its first probe has begun.
        exit_code: of the command, with `says` on its last line but whitespace.
    """

    card: Card = A100
    settings: dict[str, Any] = field(default_factory=dict)
    stage: Callable[[Played], None] | None = None
    later: Callable[[Played], None] | None = None
    exit_code: int = 0
    says: str = ""


FAULTS = {
    "a card that its neighbour has filled": Fault(
        stage=lambda played: played.set_neighbour(A100.total_bytes - 300 * MIB),
        exit_code=2,
        says="other processes hold memory of the device that the limit allows",
    ),
    "a neighbour that takes all of it in the middle": Fault(
        later=lambda played: played.set_neighbour(A100.total_bytes - 100 * MIB),
        exit_code=1,
        says="other processes took the memory that was free when the search began",
    ),
    "a driver that is too old": Fault(
        settings={"driver_version": 12020}, exit_code=2, says="The NVIDIA driver on your system is too old"
    ),
    "a card that falls off the bus": Fault(
        later=lambda played: played.take_off_bus(),
        exit_code=2,
        says="the study keeps what was measured, and the same command goes on with it",
    ),
    "a kernel that breaks the context for good": Fault(
        settings={"kernel_error": "700:300:elementwise"}, exit_code=1, says="an illegal memory access was encountered"
    ),
    "host memory that cannot be page-locked": Fault(
        stage=lambda played: played.limit_pinned_bytes(0), exit_code=1, says="the host's memory ran out, not the GPU's"
    ),
    "memory that a killed process holds for another second": Fault(
        stage=lambda played: played.hold_after_death_s(1.0), says="--device cuda"
    ),
    "a slice of a card": Fault(card=H100_SLICE, says="--device cuda"),
    "a small card with a neighbour": Fault(card=LAPTOP, says="--device cuda"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_search_says_what_failed_and_leaves_nothing_on_the_card(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    (tmp_path / "net.py").write_text(MODEL)
    environment = variables(tmp_path / "books", fault.card, **fault.settings)
    subprocess.run([sys.executable, "-c", "import torch; torch.cuda.device_count()"], env=environment, check=False)
    played = Played(tmp_path / "books")
    if fault.stage is not None:
        fault.stage(played)
    log = tmp_path / "log"
    with log.open("w") as written:
        command = [
            sys.executable,
            "-m",
            "autotune",
            "search",
            "net.py",
            "--device",
            "cuda",
            "--budget",
            "40s",
            "--trials",
            "3",
        ]
        search = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=written, stderr=subprocess.STDOUT)
        if fault.later is not None:
            _when(lambda: "baseline" in log.read_text() or "searching" in log.read_text(), search)
            fault.later(played)
        exit_code = search.wait(120)
    said = log.read_text()
    assert exit_code == fault.exit_code, said
    assert fault.says in said.strip().splitlines()[-1], said
    assert "a fault of autotune itself" not in said
    assert not played.processes()


def _when(happened: Callable[[], bool], search: subprocess.Popen[bytes]) -> None:
    while not happened() and search.poll() is None:
        time.sleep(0.02)
