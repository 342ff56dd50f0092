"""What a search says and leaves behind when a GPU, its driver or its neighbours fail."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.study.reading import load_study
from autotune.tuning.clearance import CHECK_BATCH_SIZE
from autotune.units import GIB, MIB
from tests.driver.cards import A100, H100_SLICE, LAPTOP, Card
from tests.driver.played import Played
from tests.driver.run import open_books, variables
from tests.short_play_off import AUTOTUNE

pytestmark = [pytest.mark.gpu, pytest.mark.played]
GLOBAL_BATCH = 32
MODEL = """
import time

import torch
from torch import nn

GLOBAL_BATCH = 32
BASELINE = {}


def build_model():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 1000), nn.Linear(1000, 10))


def make_batch(n):
    return torch.randn(n, 3, 32, 32), torch.randint(10, (n,))


def training_step(model, batch):
    images, labels = batch
    if len(labels) == CHECK_BATCH_SIZE:
        labels = labels * 1
        time.sleep(0.01)
    return nn.functional.cross_entropy(model(images), labels)
""".replace("CHECK_BATCH_SIZE", str(CHECK_BATCH_SIZE))


TOO_HOT = 0x40  # of NVML's reasons for a low clock
NOT_LOADED = 9  # NVML_ERROR_DRIVER_NOT_LOADED
GROUPS = {"copies_up_to": 65536, "nccl_mib": 100}
SECOND = "GPU-91a7edca-4d00-4000-8000-000000000001"


def fill_the_first(played: Played) -> None:
    played.set_neighbour(A100.total_bytes - 100 * MIB)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens, and what the search ends with.

    Those that another one shows nearly as well are `slow`.

    Attributes:
        settings: of the driver, for each process's whole life.
        cards: how many of the card, and `environment` what else their users set.
        devices: the option's value, where several of them train one model.
        stage: changes the played cards before the search begins; `later` once its first probe has begun.
        budget: of the search, which ends before it is spent where all goes well.
        kinds: of outcomes that may be in the study then; None says nothing of them.
        exit_code: of the command, with `says` on its last line, and `mentions` anywhere before.
    """

    card: Card = A100
    cards: int = 1
    devices: str = "1"
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    stage: Callable[[Played], None] | None = None
    later: Callable[[Played], None] | None = None
    budget: str = "40s"
    slow: bool = False
    kinds: frozenset[str] | None = None
    exit_code: int = 0
    says: str = ""
    mentions: str = ""


FAULTS = {
    "a card that its neighbour has filled": Fault(
        stage=lambda played: played.set_neighbour(A100.total_bytes - 300 * MIB),
        kinds=frozenset(),
        exit_code=2,
        says="other processes hold memory of the device that the limit allows",
    ),
    "a neighbour that takes all of it in the middle": Fault(
        later=lambda played: played.set_neighbour(A100.total_bytes - 100 * MIB),
        kinds=frozenset({"oom"}),
        exit_code=1,
        says="other processes took the memory that was free when the search began",
    ),
    "a driver that is too old": Fault(
        settings={"driver_version": 12020},
        kinds=frozenset(),
        exit_code=2,
        says="The NVIDIA driver on your system is too old",
    ),
    "a card that falls off the bus": Fault(
        later=lambda played: played.take_off_bus(),
        exit_code=2,
        says="the study keeps what was measured, and the same command goes on with it",
    ),
    "a kernel that breaks the context for good": Fault(
        settings={"kernel_error": "700:300:elementwise"},
        kinds=frozenset({"crashed", "error", "unsupported"}),
        exit_code=1,
        says="an illegal memory access was encountered",  # also where cuBLAS or cuDNN is called next
    ),
    "host memory that cannot be page-locked": Fault(
        stage=lambda played: played.limit_pinned_bytes(0),
        kinds=frozenset({"oom"}),
        exit_code=1,
        says="the host's memory ran out, not the GPU's",
    ),
    "memory that a killed process holds for another second": Fault(
        slow=True, stage=lambda played: played.hold_after_death_s(1.0), says="--device cuda"
    ),
    "a comparison with plain fp32 that breaks the context": Fault(
        # integers, multiplied where a batch is a comparison's; 10 ms later a convolution, which cuDNN does not begin
        settings={"kernel_error": "700:1:AUnaryFunctorIlll"},
        budget="2m",
        says="--device cuda",
        mentions="an illegal memory access was encountered (it shows as RuntimeError: GET was unable to find an engine",
    ),
    "a small card, alone, that the model fills": Fault(
        card=replace(LAPTOP, total_bytes=780 * MIB),
        exit_code=1,
        says="raise --memory-limit, or make the model or the sample smaller",
    ),
    "a slice of a card": Fault(card=H100_SLICE, slow=True, says="--device cuda"),
    "a small card with a neighbour": Fault(card=LAPTOP, slow=True, says="--device cuda"),
    "a neighbour that comes in the middle and leaves room": Fault(
        slow=True, later=lambda played: played.set_neighbour(2 * GIB), says="--device cuda"
    ),
    "a neighbour that goes in the middle": Fault(
        slow=True,
        stage=lambda played: played.set_neighbour(20 * GIB),
        later=lambda played: played.set_neighbour(0),
        says="--device cuda",
        mentions="1 other process holds 20.0 GiB of cuda:0",
    ),
    "a card that is too hot": Fault(
        slow=True,
        stage=lambda played: played.set_throttle_reasons(TOO_HOT),
        says="--device cuda",
        mentions="the clock of cuda:0 was throttled (temperature (hardware))",
    ),
    "no driver that NVML finds": Fault(
        settings={"nvml_error": NOT_LOADED}, exit_code=2, says="no NVIDIA driver is installed"
    ),
    "no plan in cuDNN": Fault(
        stage=lambda played: played.remove_cudnn_plans(), exit_code=2, says="unable to find an engine"
    ),
    "the second of two cards by its number, the first full": Fault(
        cards=2, slow=True, stage=fill_the_first, environment={"CUDA_VISIBLE_DEVICES": "1"}, says="--device cuda"
    ),
    "the second of two cards by its UUID, the first full": Fault(
        cards=2, stage=fill_the_first, environment={"CUDA_VISIBLE_DEVICES": SECOND}, says="--device cuda"
    ),
    "the second of two cards that train together falls off the bus": Fault(
        slow=True,
        cards=2,
        devices="2",
        settings=GROUPS,
        later=lambda played: played.take_off_bus(1),
        exit_code=2,
        says="the study keeps what was measured, and the same command goes on with it",
    ),
    "a neighbour that takes the second of two cards that train together": Fault(
        slow=True,
        cards=2,
        devices="2",
        settings=GROUPS,
        later=lambda played: played.set_neighbour(A100.total_bytes - 100 * MIB, 1),
        kinds=frozenset({"oom", "ok"}),
        exit_code=1,
        says="other processes took the memory that was free when the search began",
    ),
    "a number that no card has": Fault(
        environment={"CUDA_VISIBLE_DEVICES": "3"}, exit_code=2, says="CUDA_VISIBLE_DEVICES='3' hides every GPU"
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if fault.slow else []) for name, fault in FAULTS.items()]
)
def test_a_search_says_what_failed_and_leaves_nothing_on_the_card(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    each = GLOBAL_BATCH // int(fault.devices)
    (tmp_path / "net.py").write_text(MODEL.replace("BASELINE = {}", f'BASELINE = {{"batch_size": {each}}}'))
    environment = variables(tmp_path / "books", fault.card, fault.cards, **fault.settings) | fault.environment
    played = open_books(environment)
    if fault.stage is not None:
        fault.stage(played)
    log = tmp_path / "log"
    with log.open("w") as written:
        command = [
            *AUTOTUNE,
            "search",
            "net.py",
            "--device",
            "cuda",
            "--devices",
            fault.devices,
            "--budget",
            fault.budget,
            "--trials",
            "2",
        ]
        search = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=written, stderr=subprocess.STDOUT)
        if fault.later is not None:
            _when(lambda: _has_begun(tmp_path / "studies" / "net.db"), search)
            fault.later(played)
        exit_code = search.wait(180)
    said, kinds = log.read_text(), _kinds(tmp_path / "studies" / "net.db")
    print(f"| {name} | {_listed(kinds)} | {exit_code} | {said.strip().splitlines()[-1]} |")  # shown by `pytest -rP`
    assert exit_code == fault.exit_code, said
    last = said.strip().splitlines()[-1]
    assert fault.says in last, said
    assert fault.mentions in said, said
    assert fault.kinds is None or fault.kinds >= kinds.keys(), said
    assert exit_code != 0 or kinds["ok"], said
    assert "a fault of autotune itself" not in said
    assert not any(played.processes(device) for device in range(fault.cards))


def _kinds(study: Path) -> Counter[str]:
    """How often each kind of outcome is in the study, its play-off included; empty where the search came to no probe."""
    return Counter(str(trial.outcome.kind) for trial in load_study(study).probes) if study.exists() else Counter()


def _listed(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


def _has_begun(study: Path) -> bool:
    """Whether a trial of the study runs or has run."""
    if not study.exists():
        return False
    with contextlib.closing(sqlite3.connect(study)) as rows, contextlib.suppress(sqlite3.OperationalError):
        return bool(rows.execute("SELECT 1 FROM trials WHERE state != 'WAITING'").fetchone())
    return False  # its tables are being made


def _when(happened: Callable[[], bool], search: subprocess.Popen[bytes]) -> None:
    while not happened() and search.poll() is None:
        time.sleep(0.02)
