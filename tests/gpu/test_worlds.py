"""Probes of several cards: control flow and memory of a world, with NCCL played."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune.records.outcome import Kind
from autotune.study.reading import load_study
from autotune.units import MIB
from tests.driver.cards import A100, LAPTOP
from tests.driver.played import Played
from tests.driver.run import open_books, variables
from tests.gpu.test_faults import MODEL
from tests.short_play_off import AUTOTUNE

pytestmark = [pytest.mark.gpu, pytest.mark.played]


def probe(folder: Path, books: Path, config: dict[str, Any], **neighbours: int) -> tuple[dict[str, Any], Played]:
    """The outcome of a probe of two cards, and the cards afterwards."""
    (folder / "net.py").write_text(MODEL)
    environment = variables(books, A100, 2, copies_up_to=65536, nccl_mib=100)
    played = open_books(environment)
    for number in neighbours.values():
        played.set_neighbour(number, 1)
    done = subprocess.run(
        [*AUTOTUNE, "probe", "net.py", "--devices", "2", "--config", json.dumps(config), "--json"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout), played


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_cards_train_together_and_nothing_is_left_on_them(tmp_path: Path, parallel: str) -> None:
    outcome, played = probe(tmp_path, tmp_path / "books", {"batch_size": 8, "parallel": parallel})
    assert outcome["kind"] == "ok", outcome
    assert outcome["world"]["size"] == 2
    assert not played.processes(0)
    assert not played.processes(1)


def test_the_rank_that_runs_out_of_memory_is_named(tmp_path: Path) -> None:
    full = A100.total_bytes - 700 * MIB
    outcome, _ = probe(tmp_path, tmp_path / "books", {"batch_size": 16}, second=full)
    assert outcome["kind"] == "oom", outcome
    assert outcome["cause"].startswith("rank 1: ")


LARGE = """
import torch
from torch import nn

WIDTH, NUM_BLOCKS, GLOBAL_BATCH = 2048, 24, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.utils.skip_init(nn.Linear, WIDTH, 4 * WIDTH)  # what nobody writes to, the host need not hold
        self.outer = nn.utils.skip_init(nn.Linear, 4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


def build_model():
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def make_batch(batch_size):
    return torch.zeros(batch_size, WIDTH)


def training_step(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.slow
def test_a_model_that_fits_no_single_card_is_found_to_train_on_four(tmp_path: Path) -> None:
    """805 million parameters: with Adam, 9 GiB even where no gradient outlives its update, on cards of 8 GiB."""
    (tmp_path / "large.py").write_text(LARGE)
    environment = variables(tmp_path / "books", LAPTOP, 4, copies_up_to=65536, nccl_mib=100)
    limits = ["--budget", "5m", "--trials", "4", "--probe-timeout", "90s"]
    command = [*AUTOTUNE, "search", "large.py", "--devices", "4", *limits]
    with (tmp_path / "log").open("w") as log:
        subprocess.run(command, env=environment, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, check=False)
    probes = load_study(tmp_path / "studies" / "large.db").probes
    trained = [probe.config for probe in probes if probe.outcome.kind is Kind.OK]
    assert trained and all(str(config["parallel"]).startswith(("fsdp", "hsdp")) for config in trained), (
        tmp_path / "log"
    ).read_text()
    assert probes[0].outcome.kind is Kind.OOM  # copies of the model
