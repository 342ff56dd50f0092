"""Machines with other cards than one A100: what is told of them before there is a context, and what CUDA itself says afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.driver.cards import H100, H100_SLICE, RTX_4090, T4, Card
from tests.driver.run import variables

pytestmark = [pytest.mark.gpu, pytest.mark.played]

TELL = """
import json, os, sys
from autotune.devices import available, open_device
told = [device.info() for device in available() if device.kind == "cuda"]
assert "torch" not in sys.modules or len(told) > 1  # only unlike cards are asked for
import torch
found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
pairs = [
    [[info.model, info.capability, info.total_bytes, info.num_multiprocessors] for info in told],
    [[card.name, (card.major, card.minor), card.total_memory, card.multi_processor_count] for card in found],
]
used, devices = {}, {}
for index in reversed(range(len(found))):  # a session on one after another
    device = devices[index] = open_device(f"cuda:{index}")
    device.enter()
    device.limit_memory(4 * 2**30)
    held = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    used[index] = [held.device.index, device.held_bytes(0) >= 2**28, device.peak_bytes() < 2**30]
    try:
        torch.empty(2**32, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        used[index].append(device.is_crowded(2**32))
for index, device in devices.items():
    device.enter()  # again, after a session on another card
    used[index].append(torch.cuda.current_device())
print(json.dumps([*pairs, used]), flush=True)
os._exit(0)  # as a probe ends: a thread of autograd that still lets its last graph go would abort an interpreter that finalizes
"""


@pytest.mark.parametrize(
    ("card", "others"),
    [(T4, (H100,)), pytest.param(RTX_4090, (), marks=pytest.mark.slow), (H100_SLICE, ())],
    ids=["unlike", "rtx4090", "slice"],
)
def test_cards_are_told_as_cuda_finds_them_and_each_is_trained_on(
    card: Card, others: tuple[Card, ...], tmp_path: Path
) -> None:
    environment = variables(tmp_path / "books", card, others=others)
    done = subprocess.run([sys.executable, "-c", TELL], env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    told, found, used = json.loads(done.stdout)
    assert told == found
    assert used == {str(index): [index, True, True, False, index] for index in range(1 + len(others))}
