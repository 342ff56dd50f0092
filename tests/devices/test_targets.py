"""The devices that memory is predicted for: kinds, cards, and a GPU that is not there."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from autotune.devices.targets import CARDS, AbsentGpu, GpuKind, card_of, gpu_of, target_of
from autotune.errors import ConfigError
from autotune.records.device import DeviceInfo
from autotune.units import GIB, MIB


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


T4 = DeviceInfo(name="cuda", model="T4 16GB", total_bytes=15 * GIB, free_bytes=15 * GIB, capability=(7, 5))


def test_it_says_what_it_was_described_as_and_works_on_the_cpu() -> None:
    device = AbsentGpu(T4)
    assert (device.kind, device.info()) == ("cuda", T4)
    assert device.torch_device.type == "cpu"


def test_a_process_on_it_is_taken_to_hold_a_cuda_context() -> None:
    assert 256 * MIB < AbsentGpu(T4).current_bytes() < 1024 * MIB


def test_a_description_survives_the_way_into_another_process() -> None:
    assert DeviceInfo.from_dict({**asdict(T4), "capability": [7, 5], "notes": []}) == T4


@pytest.mark.parametrize(
    "text", ["RTX 4090", "rtx4090", "rtx-4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "RTX 4090 24GB"]
)
def test_a_card_is_found_however_its_name_is_written(text: str) -> None:
    assert card_of(text).name == "RTX 4090 24GB"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("Tesla T4", "T4 16GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
    ],
)
def test_a_card_is_found_by_the_name_that_its_driver_gives(text: str, name: str) -> None:
    assert card_of(text).name == name


def test_every_card_is_found_by_its_own_name() -> None:
    assert [card_of(card.name) for card in CARDS] == list(CARDS)


def test_a_card_has_a_little_less_memory_than_is_printed_on_it() -> None:
    for card in CARDS:
        printed_gb = int(card.name.rsplit(" ", 1)[1].removesuffix("GB"))
        assert 0.85 * printed_gb * GIB < card.total_bytes < 1.02 * printed_gb * GIB, card


def test_bfloat16_begins_with_the_capability_of_an_a100() -> None:
    assert card_of("A100 40GB").capability == (8, 0)
    assert card_of("V100 16GB").capability < (8, 0) < card_of("RTX 3090").capability


def test_a_size_is_a_card_without_a_name() -> None:
    assert card_of("80GiB").total_bytes == 80 * GIB
    assert card_of("24GB").total_bytes == 24 * 10**9


def test_a_name_that_comes_in_two_sizes_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match="A100 80GB or A100 40GB"):
        card_of("A100")


@pytest.mark.parametrize(("text", "nearest"), [("RTX 409", "RTX 4090"), ("H1000", "H100"), ("A100 60GB", "A100")])
def test_an_unknown_name_is_refused_with_the_nearest_names(text: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        card_of(text)


@pytest.mark.parametrize("text", ["", "voodoo", "80%"])
def test_what_is_neither_a_name_nor_a_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="24GiB"):
        card_of(text)


def test_a_number_without_a_unit_is_refused_rather_than_read_as_bytes() -> None:
    with pytest.raises(ConfigError, match="with its unit"):
        card_of("24")
