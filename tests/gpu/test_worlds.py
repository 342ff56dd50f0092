"""Probes of several cards: control flow and memory of a world, with NCCL played."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.records.outcome import Kind
from autotune.study.caches import CALIBRATIONS
from autotune.study.place import DEFAULT_FOLDER
from autotune.study.reading import load_study
from autotune.units import MIB
from tests.driver.cards import A100, LAPTOP
from tests.driver.played import Played
from tests.driver.run import open_books, variables
from tests.gpu.test_faults import GROUPS, MODEL
from tests.short_play_off import AUTOTUNE

NCCL_BYTES = GROUPS["nccl_mib"] * MIB  # of a communicator

pytestmark = [pytest.mark.gpu, pytest.mark.played]


def probe(
    folder: Path, books: Path, config: dict[str, Any], num_cards: int = 2, **neighbours: int
) -> tuple[dict[str, Any], Played]:
    """The outcome of a probe of some cards, and the cards afterwards."""
    (folder / "net.py").write_text(MODEL)
    environment = variables(books, A100, num_cards, **GROUPS)
    played = open_books(environment)
    for number in neighbours.values():
        played.set_neighbour(number, 1)
    done = subprocess.run(
        [*AUTOTUNE, "probe", "net.py", "--devices", str(num_cards), "--config", json.dumps(config), "--json"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout), played


@pytest.mark.parametrize(("parallel", "num_cards", "num_groups"), [("ddp", 2, 1), ("hsdp:2", 4, 3)])
def test_cards_train_together_and_nothing_is_left_on_them(
    tmp_path: Path, parallel: str, num_cards: int, num_groups: int
) -> None:
    outcome, played = probe(tmp_path, tmp_path / "books", {"batch_size": 8, "parallel": parallel}, num_cards)
    assert outcome["kind"] == "ok", outcome
    assert outcome["world"]["size"] == num_cards
    assert [played.processes(number) for number in range(num_cards)] == [{}] * num_cards
    memory = outcome["measurement"]["memory"]
    assert (memory["num_communicators"], memory["communicators_bytes"]) == (num_groups, num_groups * NCCL_BYTES)


DOCTOR = """
import json
from autotune import doctor
if __name__ == "__main__":
    print(json.dumps(doctor.plain(doctor._together(("cuda:0", "cuda:1"), lambda name: None))))
"""


def test_the_doctor_sees_two_cards_together_and_what_their_communicator_takes(tmp_path: Path) -> None:
    (tmp_path / "examine.py").write_text(DOCTOR)
    environment = variables(tmp_path / "books", A100, 2, **GROUPS)
    command = [sys.executable, "examine.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = {line["name"]: line for line in json.loads(done.stdout)["lines"]}
    assert {name: line["state"] for name, line in lines.items()} == {
        "cards": "ok",
        "connection": "unavailable",  # the played NVML knows no links
        **dict.fromkeys(("devices together", "all-reduce", "all-gather", "reduce-scatter", "communicator"), "ok"),
    }, done.stderr
    assert [rank["outside_bytes"] for rank in lines["communicator"]["facts"]["ranks"]] == [NCCL_BYTES] * 2
    (kept,) = (tmp_path / DEFAULT_FOLDER / CALIBRATIONS).iterdir()
    assert json.loads(kept.read_text())["measured"] == [[1, NCCL_BYTES]]


def test_a_search_leaves_what_communicators_took_for_those_after_it(tmp_path: Path) -> None:
    """Its first prediction is an estimate of 512 MiB."""
    (tmp_path / "net.py").write_text(LARGE.replace("2048, 24", "512, 8"))
    environment = variables(tmp_path / "books", A100, 2, **GROUPS)
    limits = ["--trials", "1", "--budget", "60s", "--quiet"]
    config = {"batch_size": 16}

    def said(*arguments: str) -> dict[str, Any]:
        command = [*AUTOTUNE, *arguments, "--devices", "2", "--json"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        return json.loads(done.stdout)

    found = said("search", "net.py", *limits)
    booked, alone = found["baseline"], found["one_device"]
    assert 0 < alone["peak_bytes"] < booked["peak_bytes"], alone["failure"]  # nothing is kept there to talk to others
    predicted = said("predict", "net.py", "--config", json.dumps(config))
    assert predicted["communicators"]["measured"] == [[1, NCCL_BYTES]]
    assert predicted["config"]["peak_bytes"] == pytest.approx(booked["peak_bytes"], rel=0.01)


def test_the_rank_that_runs_out_of_memory_is_named(tmp_path: Path) -> None:
    full = A100.total_bytes - 700 * MIB
    outcome, _ = probe(tmp_path, tmp_path / "books", {"batch_size": 16}, second=full)
    assert outcome["kind"] == "oom", outcome
    assert outcome["cause"].startswith("rank 1: ")


TRAINING_STEP = """
import os, pathlib, signal, time

steps = 0


def training_step(model, batch):
    global steps
    steps += 1
    if steps == 4 and torch.distributed.get_rank() == 1:
        pathlib.Path("began").write_text(str(time.monotonic()))
        FAULT
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What befalls rank 1 in a step: in its own code, or on its card; and what becomes of the probe."""

    code: str
    befall: Callable[[Played], None] = lambda played: None
    known_after_s: float = 0.0
    kind: str
    cause: str


FAULTS = {
    "killed": Fault(
        code="os.kill(os.getpid(), signal.SIGKILL)",
        kind="crashed",
        cause="rank 1: died of SIGKILL (Killed), during warmup",
    ),
    "hangs": Fault(
        code="time.sleep(1000)",
        known_after_s=TIMEOUT_S,
        kind="timeout",
        cause="killed after 30 s, during warmup; the others waited for rank 1 (net.py, line ",
    ),
    "its card vanishes": Fault(
        code="time.sleep(0.5)",
        befall=lambda played: played.take_off_bus(1),
        kind="error or crashed",  # as the step or NCCL's watchdog, which aborts the process, sees it first
        cause="rank 1: ",
    ),
}


@pytest.mark.parametrize(
    "name", ["its card vanishes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("killed", "hangs"))]
)
def test_what_happens_to_one_card_ends_all_and_leaves_nothing_on_any(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    (tmp_path / "net.py").write_text(
        MODEL.partition("def training_step")[0] + TRAINING_STEP.replace("FAULT", fault.code)
    )
    environment = variables(tmp_path / "books", A100, 2, **GROUPS)
    played = open_books(environment)
    config = json.dumps({"batch_size": 16, "parallel": "ddp"})
    options = ["--devices", "2", "--config", config, "--timeout", f"{TIMEOUT_S}s", "--json"]
    began = tmp_path / "began"
    with subprocess.Popen(
        [*AUTOTUNE, "probe", "net.py", *options], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as probing:
        while not began.exists() and probing.poll() is None:
            time.sleep(0.02)
        fault.befall(played)
        outcome = json.loads(probing.communicate()[0])
    seconds = time.monotonic() - float(began.read_text()) - fault.known_after_s
    left = [played.processes(device) for device in range(2)]
    print(f"| {name} | {outcome['kind']} | {outcome['cause']} | {seconds:.1f} s | {left} |")  # shown by `pytest -rP`
    assert outcome["kind"] in fault.kind.split(" or "), outcome
    assert outcome["cause"].startswith(fault.cause)
    assert left == [{}, {}]


TRAIN = """
import pathlib, sys, torch
from torch import nn
from autotune.group import join
from autotune.records.config import World
from autotune.session import prepare
from autotune.task import Task

rank = int(sys.argv[1])
join(World(size=2, rank=rank), torch.device("cuda", rank), pathlib.Path("store"))


def training_step(model, batch):
    if losses and rank == 1:
        torch.empty(2**40, device="cuda")
    return model(batch).square().mean()


def build_model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])


losses = []
task = Task(build_model=build_model, make_batch=lambda n: torch.randn(n, 8), training_step=training_step, global_batch=8)
session = prepare(task, {"batch_size": 4, "parallel": "fsdp"}, device=f"cuda:{rank}")
try:
    while True:
        losses.append(float(session.step(torch.randn(4, 8))))
except Exception as error:
    print(type(error).__name__, error, flush=True)
sys.stdin.read()
"""


def test_what_runs_out_of_memory_on_one_card_raises_for_all_although_its_process_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    environment = variables(tmp_path / "books", A100, 2, **GROUPS)
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", str(rank)],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = [next(rank.stdout, "") for rank in ranks if rank.stdout is not None]
    for rank in ranks:
        rank.communicate(timeout=60)  # with the end of what they read
    assert first.startswith(
        "PeerError rank 1 ran out of memory (an allocation of 4.00 TiB failed), and no other process"
    )
    assert second.startswith("OutOfMemoryError")


ALIKE = """
import torch
import autotune
from autotune.errors import DeviceError

task = autotune.Task(build_model=lambda: torch.nn.Linear(8, 8), make_batch=lambda n: torch.randn(n, 8), global_batch=8)
try:
    autotune.prepare(task, {"batch_size": 4})
except DeviceError as error:
    print(error, flush=True)
"""


def test_more_ranks_than_cards_are_refused_before_nccl_waits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ALIKE)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        env=variables(tmp_path / "books", A100, 1, **GROUPS),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.count("ranks 0 and 1 have taken one GPU, cuda:0 of ") == 2, done.stdout + done.stderr


LARGE = """
import torch
from torch import nn

WIDTH, NUM_BLOCKS, GLOBAL_BATCH = 2048, 24, 64
BASELINE = {"batch_size": 16}  # else its batch is halved first, in vain


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
