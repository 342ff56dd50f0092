"""Energy on a card whose counter follows what it does: measured beside the speed, searched for, and the reason where it is not counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.report import formats
from autotune.report.study import study_sections
from autotune.report.terminal import as_text
from autotune.study.reading import load_study
from tests.driver.cards import A100, H100_SLICE, Card
from tests.driver.run import variables
from tests.short_play_off import SHORTEN

pytestmark = [pytest.mark.gpu, pytest.mark.played]

# a slow one, so that the host keeps up; bf16 is twice as fast as fp32 and draws three times the power
CARD = replace(A100, fp32_tflops=0.4, tf32_tflops=0.4, bf16_tflops=0.8)
DRAWS = {"idle_w": 20, "kernel_w": 60, "fp32_w": 100, "tf32_w": 300, "bf16_w": 300}
MODEL = """
import quick
import torch
from torch import nn

GLOBAL_BATCH = 1024
BASELINE = {"batch_size": 1024, "amp": "bf16"}


def build_model():
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def make_batch(n):
    return torch.randn(n, 1024), torch.randint(10, (n,))
"""
# the played counter moves at once, so seconds of it tell no more than parts of one
QUICK = """
from dataclasses import replace
from autotune.devices.cuda import CudaDevice
CudaDevice.capabilities = replace(CudaDevice.capabilities, settles_s=0.3, energy_window_s=0.3)
"""
AUTOTUNE = (sys.executable, "-c", f"import quick; {SHORTEN}; from autotune.cli import main; raise SystemExit(main())")
OTHERS = (
    "expandable_segments",
    "checkpoint_segments",
    "checkpoint_policy",
    "inplace_activations",
    "optimizer_impl",
    "optimizer_in_backward",
)
ONLY = ("--fix", "batch_size=1024", "--budget", "2m", *(word for name in OTHERS for word in ("--exclude", name)))


def run(folder: Path, command: str, *options: str, card: Card = CARD, **settings: object) -> dict[str, Any]:
    """What a command prints as JSON; what it says on stderr is shown where it fails."""
    (folder / "quick.py").write_text(QUICK)
    (folder / "net.py").write_text(MODEL)
    environment = variables(folder / "books", card, **DRAWS, **settings)
    environment["PYTHONPATH"] += os.pathsep + str(folder)
    words = [*AUTOTUNE, command, "net.py", *options, "--json"]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    print(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_search_for_energy_ends_with_what_takes_less_and_shows_all_three_axes(tmp_path: Path) -> None:
    found = run(tmp_path, "search", *ONLY, "--objective", "energy", "--price", "$2.50/h")
    assert found["config"]["amp"] == "off"
    assert found["verdict"] == "thriftier" and found["energy_ratio_ci"][1] < 1
    assert found["samples_per_s"] < found["baseline"]["samples_per_s"]
    assert {one["config"]["amp"] for one in found["front"]} >= {"off", "bf16"}  # either is best in something
    assert all(one["joules_per_sample"] and one["samples_per_s"] and one["peak_bytes"] for one in found["front"])
    cost = found["money"]["per_million_samples"]
    assert cost == pytest.approx(2.5e6 / 3600 / found["samples_per_s"])
    shown = load_study(tmp_path / "studies" / "net.db")
    text, page = as_text(study_sections(shown), 120), formats.render(shown, "html")
    assert "Memory/throughput/energy front" in text and "Thriftier: " in text
    assert '<th class="number">J/sample</th>' in page
    assert shown.front()["joules_per_sample"].notna().all()


@pytest.mark.slow  # what the first one shows of energy, and others of speed
def test_the_same_search_by_both_objectives_ends_with_different_answers(tmp_path: Path) -> None:
    fast = run(tmp_path, "search", *ONLY, "--study", "fast")
    thrifty = run(tmp_path, "search", *ONLY, "--study", "thrifty", "--objective", "energy")
    assert (fast["config"]["amp"], thrifty["config"]["amp"]) == ("bf16", "off")
    assert thrifty["samples_per_s"] < fast["samples_per_s"]
    assert thrifty["joules_per_sample"] < fast["joules_per_sample"]


def test_a_world_uses_the_energy_of_all_its_cards(tmp_path: Path) -> None:
    config = json.dumps({"batch_size": 512, "accumulation_steps": 1})
    options = ("--config", config, "--devices", "2", "--global-batch", "1024")
    found = run(tmp_path, "probe", *options, num_cards=2, copies_up_to=65536, nccl_mib=100)["measurement"]
    assert len({one["counter"] for one in found["counted"]}) == 2
    power_w = sum(one["power_w"] for one in found["counted"])
    assert found["joules_per_sample"] == pytest.approx(power_w / found["samples_per_s"])
    assert 2 * DRAWS["idle_w"] < power_w < 2 * DRAWS["fp32_w"]


OLD = replace(A100, name="Tesla P100", capability=(6, 0))


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (OLD, "the driver does not count the energy of cuda:0 (Tesla P100)"),
        (H100_SLICE, "cuda:0 is a part of a GPU (MIG), whose counter is of the whole"),
    ],
    ids=["old card", "slice"],
)
def test_where_nothing_counts_energy_the_objective_is_refused_with_the_reason(
    tmp_path: Path, card: Card, why: str
) -> None:
    found = run(tmp_path, "search", "--device", "cuda", "--objective", "energy", card=card)
    assert found["error"].startswith("--objective energy: ") and why in found["error"]
    assert not (tmp_path / "studies").exists()
