"""How memory on a device is predicted."""

from __future__ import annotations

import pytest

from autotune.devices.targets import CARDS, GpuKind, gpu_of, target_of
from autotune.records.device import DeviceInfo


def device(name: str, capability: tuple[int, int], num_multiprocessors: int = 0) -> DeviceInfo:
    return DeviceInfo(
        name=name,
        model="a card",
        total_bytes=2**34,
        free_bytes=2**34,
        capability=capability,
        num_multiprocessors=num_multiprocessors,
    )


def test_gpus_are_of_one_kind_if_their_kernels_allocate_alike() -> None:
    assert target_of(device("cpu", (0, 0))) == "cpu"
    assert target_of(device("cuda:0", (8, 0), 108)) == target_of(device("cuda:1", (8, 0), 108))
    assert target_of(device("cuda:0", (8, 0), 108)) != target_of(device("cuda:0", (8, 0), 56))


@pytest.mark.parametrize(
    ("capability", "threads", "flash"), [((7, 5), 1024, False), ((8, 0), 2048, True), ((8, 9), 1536, True)]
)
def test_a_target_names_the_gpu(capability: tuple[int, int], threads: int, flash: bool) -> None:
    gpu = gpu_of(target_of(device("cuda:0", capability, 40)))
    assert gpu == GpuKind(capability=capability, num_multiprocessors=40)
    assert (gpu.threads_per_multiprocessor, gpu.has_flash_attention) == (threads, flash)


def test_what_is_not_known_of_a_gpu_is_an_a100s() -> None:
    assert target_of(device("cuda:0", (0, 0))) == "cuda"
    assert gpu_of("cuda") == GpuKind(capability=(8, 0), num_multiprocessors=108)
    assert gpu_of(target_of(device("cuda:0", (9, 0)))) == GpuKind(capability=(9, 0), num_multiprocessors=108)


def test_cards_by_name_are_told_apart() -> None:
    without_flash = {
        card.name for card in CARDS if not gpu_of(target_of(device("cuda:0", card.capability))).has_flash_attention
    }
    assert {"V100 16GB", "T4 16GB"} <= without_flash
    assert not any(name.startswith(("A", "H", "L", "B", "RTX 30", "RTX 40")) for name in without_flash)
    assert all(card.num_multiprocessors > 0 for card in CARDS)
