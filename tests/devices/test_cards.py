import pytest

from autotune.devices.targets import CARDS, card_of
from autotune.errors import ConfigError
from autotune.units import GIB


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
