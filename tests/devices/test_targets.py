"""How memory on a device is predicted."""

from __future__ import annotations

import pytest

from autotune.devices.cards import CARDS
from autotune.devices.targets import CPU, CUDA, OLD_CUDA, target_of
from autotune.records.device import DeviceInfo


def device(name: str, capability: tuple[int, int]) -> DeviceInfo:
    return DeviceInfo(name=name, model="a card", total_bytes=2**34, free_bytes=2**34, capability=capability)


@pytest.mark.parametrize(
    ("name", "capability", "target"),
    [
        ("cpu", (0, 0), CPU),
        ("cuda:0", (9, 0), CUDA),
        ("cuda:0", (8, 0), CUDA),
        ("cuda:0", (7, 5), OLD_CUDA),
        ("cuda:0", (0, 0), CUDA),
    ],
)
def test_gpus_before_ampere_have_kernels_of_their_own(name: str, capability: tuple[int, int], target: str) -> None:
    assert target_of(device(name, capability)) == target


def test_cards_by_name_are_told_apart() -> None:
    old = {card.name for card in CARDS if target_of(device("cuda:0", card.capability)) == OLD_CUDA}
    assert {"V100 16GB", "T4 16GB"} <= old
    assert not any(name.startswith(("A", "H", "L", "B", "RTX 30", "RTX 40")) for name in old)
