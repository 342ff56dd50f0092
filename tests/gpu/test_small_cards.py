"""A search on a small card whose memory others share: what you train today does not fit, and little is spent on what does not either."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.records.outcome import Kind
from autotune.study.reading import load_study
from autotune.units import GIB
from tests.driver.cards import LAPTOP
from tests.driver.run import ROOT, open_books, variables
from tests.short_play_off import AUTOTUNE

pytestmark = [pytest.mark.gpu, pytest.mark.played]
SIZE = {
    "GPT_WIDTH": "512",
    "GPT_HEADS": "8",
    "GPT_CONTEXT": "1024",
    "GPT_VOCABULARY": "32768",
    "GPT_GLOBAL_BATCH": "64",
}


def test_few_probes_run_out_of_memory_and_peaks_are_what_the_driver_has_booked(tmp_path: Path) -> None:
    """The scores of the baseline's 16 samples alone take 2 GiB, several times over, of a card that has 7 GiB left."""
    card = replace(LAPTOP, neighbour_bytes=GIB)
    environment = variables(tmp_path / "books", card) | SIZE
    played, booked = open_books(environment), dict[int, int]()
    model = str(ROOT / "studies" / "gpt" / "model.py")
    command = [*AUTOTUNE, "search", model, "--device", "cuda", "--budget", "30s", "--trials", "5"]
    with (tmp_path / "log").open("w") as log:
        search = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        while search.poll() is None:
            for number, held_bytes in played.processes().items():
                booked[number] = max(booked.get(number, 0), held_bytes)
            time.sleep(0.01)
    study = load_study(tmp_path / "studies" / "gpt.db")
    kinds = Counter(probe.outcome.kind for probe in study.probes)
    assert study.probes[0].outcome.kind is Kind.OOM and kinds[Kind.OOM] <= 2, (tmp_path / "log").read_text()
    assert {front.peak_bytes for front in study.front_configs()} <= set(booked.values())
    assert not played.processes() and played.used_bytes() == GIB
