"""Probes of several cards: control flow and memory of a world, with NCCL played."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.units import MIB
from tests.driver.cards import A100
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


DOCTOR = """
import json
from autotune import doctor
if __name__ == "__main__":
    print(json.dumps(doctor.plain(doctor._together(("cuda:0", "cuda:1"), lambda name: None))))
"""


def test_the_doctor_sees_two_cards_together_and_what_their_communicator_takes(tmp_path: Path) -> None:
    (tmp_path / "examine.py").write_text(DOCTOR)
    environment = variables(tmp_path / "books", A100, 2, copies_up_to=65536, nccl_mib=100)
    command = [sys.executable, "examine.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = {line["name"]: line for line in json.loads(done.stdout)["lines"]}
    assert {name: line["state"] for name, line in lines.items()} == {
        "cards": "ok",
        "connection": "unavailable",  # the played NVML knows no links
        **dict.fromkeys(("devices together", "all-reduce", "all-gather", "reduce-scatter", "communicator"), "ok"),
    }, done.stderr
    assert [rank["outside_bytes"] >= 100 * MIB for rank in lines["communicator"]["facts"]["ranks"]] == [True, True]


def test_the_rank_that_runs_out_of_memory_is_named(tmp_path: Path) -> None:
    full = A100.total_bytes - 700 * MIB
    outcome, _ = probe(tmp_path, tmp_path / "books", {"batch_size": 16}, second=full)
    assert outcome["kind"] == "oom", outcome
    assert outcome["cause"].startswith("rank 1: ")
