"""Searches in the slots of several cards: which are left out, and what becomes of a search that loses one."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.study.reading import load_study
from autotune.units import MIB
from tests.driver.cards import A100, T4, Card
from tests.driver.run import open_books, variables
from tests.gpu.test_faults import MODEL

ONE_ROUND = "from autotune.tuning import playoff; playoff.MAX_ROUNDS = playoff.MIN_ROUNDS = 1"
AUTOTUNE = (sys.executable, "-c", f"{ONE_ROUND}; from autotune.cli import main; raise SystemExit(main())")
pytestmark = [pytest.mark.gpu, pytest.mark.played]
TRACED = ("checkpoint_segments", "checkpoint_policy", "inplace_activations")  # whose memory takes long to predict

TRAINING_STEP = """
import pathlib, time


def training_step(model, batch):
    if batch[0].device.index == LOST:
        pathlib.Path("began").touch()
        while not pathlib.Path("gone").exists():
            time.sleep(0.02)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A machine of several cards.

    Attributes:
        alike: A100s, and `others` behind them on the bus.
        full: number of the card that a neighbour fills, and `lost` of the one that goes in the middle.
        slots: that are left in the end.
    """

    alike: int
    others: tuple[Card, ...] = ()
    full: int
    lost: int
    slots: tuple[str, ...]
    num_trials: int


BOXES = [
    Box(alike=3, full=1, lost=2, slots=("cuda:0",), num_trials=3),
    pytest.param(
        Box(
            alike=6,
            others=(T4, T4),
            full=1,
            lost=3,
            slots=("cuda:0", "cuda:2", "cuda:4", "cuda:5"),
            num_trials=10,
        ),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("box", BOXES, ids=lambda box: f"{box.alike + len(box.others)} cards")
def test_a_search_leaves_out_full_and_unlike_cards_and_goes_on_when_it_loses_one(tmp_path: Path, box: Box) -> None:
    step = TRAINING_STEP.replace("LOST", str(box.lost))
    (tmp_path / "net.py").write_text(MODEL.partition("def training_step")[0] + step)
    environment = variables(tmp_path / "books", A100, box.alike, others=box.others)
    played = open_books(environment)
    played.set_neighbour(A100.total_bytes - 300 * MIB, box.full)
    limits = ["--budget", "2m", "--trials", str(box.num_trials), "--sampler", "random"]
    limits += [word for name in TRACED for word in ("--exclude", name)]
    log = tmp_path / "log"
    with log.open("w") as written:
        command = [*AUTOTUNE, "search", "net.py", "--slots", "all", *limits]
        search = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=written, stderr=subprocess.STDOUT)
        while not (tmp_path / "began").exists() and search.poll() is None:
            time.sleep(0.02)
        played.take_off_bus(box.lost)
        (tmp_path / "gone").touch()
        exit_code = search.wait(240)
    said = log.read_text()
    print(said)  # shown by `pytest -rP`
    assert exit_code == 0, said
    assert f"cuda:{box.full} is no slot: " in said
    unlike = ", ".join(f"cuda:{box.alike + number} ({other.name})" for number, other in enumerate(box.others))
    assert not unlike or f"{unlike} left out; --device cuda:{box.alike} uses that kind" in said
    assert f"the slot cuda:{box.lost} is taken out: " in said
    assert "a fault of autotune itself" not in said
    study = load_study(tmp_path / "studies" / "net.db")
    used = {trial.outcome.slot for trial in study.probes} - {f"cuda:{box.lost}"}  # which may have run one before
    assert used == {*box.slots}, used
    assert study.num_running == study.num_lost == 0
    assert not any(played.processes(device) for device in range(box.alike + len(box.others)))
