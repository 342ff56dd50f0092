"""Cards that the driver plays, and the environment in which a process sees them."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Card:
    """What CUDA and NVML tell of a card.

    The rates are what products of matrices and copies take on the driver's timeline, of the card's kind and never measured. What
    they draw meanwhile are settings (`idle_w`, `kernel_w`, `fp32_w`, `tf32_w`, `bf16_w`), by default shares of the power limit.
    """

    name: str
    capability: tuple[int, int]
    total_bytes: int
    num_multiprocessors: int
    l2_bytes: int
    fp32_tflops: float
    tf32_tflops: float
    bf16_tflops: float
    memory_gb_s: float
    power_limit_w: int
    sm_clock_mhz: int
    memory_clock_mhz: int
    board_bytes: int | None = None  # of the whole card, where this is a slice of it (MIG)
    context_bytes: int = 400 * MIB
    neighbour_bytes: int = 0  # what others hold of it from the beginning


A100 = Card(
    name="NVIDIA A100-SXM4-40GB",
    capability=(8, 0),
    total_bytes=40337 * MIB,
    num_multiprocessors=108,
    l2_bytes=40 * MIB,
    fp32_tflops=15,
    tf32_tflops=80,
    bf16_tflops=180,
    memory_gb_s=1300,
    power_limit_w=400,
    sm_clock_mhz=1410,
    memory_clock_mhz=1215,
)
T4 = Card(
    name="Tesla T4",
    capability=(7, 5),
    total_bytes=14913 * MIB,
    num_multiprocessors=40,
    l2_bytes=4 * MIB,
    fp32_tflops=5,
    tf32_tflops=5,
    bf16_tflops=2.5,
    memory_gb_s=240,
    power_limit_w=70,
    sm_clock_mhz=1590,
    memory_clock_mhz=5001,
)
RTX_4090 = Card(
    name="NVIDIA GeForce RTX 4090",
    capability=(8, 9),
    total_bytes=24080 * MIB,
    num_multiprocessors=128,
    l2_bytes=72 * MIB,
    fp32_tflops=50,
    tf32_tflops=75,
    bf16_tflops=150,
    memory_gb_s=900,
    power_limit_w=450,
    sm_clock_mhz=2520,
    memory_clock_mhz=10501,
)
H100 = Card(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    total_bytes=81079 * MIB,
    num_multiprocessors=132,
    l2_bytes=50 * MIB,
    fp32_tflops=45,
    tf32_tflops=300,
    bf16_tflops=600,
    memory_gb_s=2900,
    power_limit_w=700,
    sm_clock_mhz=1980,
    memory_clock_mhz=2619,
)
H100_SLICE = Card(
    name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    capability=(9, 0),
    total_bytes=9728 * MIB,
    num_multiprocessors=16,
    l2_bytes=6 * MIB,
    fp32_tflops=5.5,
    tf32_tflops=36,
    bf16_tflops=70,
    memory_gb_s=360,
    power_limit_w=700,
    sm_clock_mhz=1980,
    memory_clock_mhz=2619,
    board_bytes=81559 * MIB,
)
LAPTOP = Card(
    name="NVIDIA GeForce RTX 4060 Laptop GPU",
    capability=(8, 9),
    total_bytes=8188 * MIB,
    num_multiprocessors=24,
    l2_bytes=32 * MIB,
    fp32_tflops=9,
    tf32_tflops=14,
    bf16_tflops=28,
    memory_gb_s=240,
    power_limit_w=80,
    sm_clock_mhz=2370,
    memory_clock_mhz=8001,
)
CARDS = {"a100": A100, "t4": T4, "rtx4090": RTX_4090, "h100": H100, "h100-slice": H100_SLICE, "laptop": LAPTOP}

_SETTINGS = Path(__file__).with_name("settings.c")
_IN_MIB = {
    "total_bytes": "TOTAL_MIB",
    "board_bytes": "BOARD_MIB",
    "neighbour_bytes": "NEIGHBOUR_MIB",
    "l2_bytes": "L2_MIB",
    "context_bytes": "CONTEXT_MIB",
}
_AS_THEY_ARE = {
    "name": "NAME",
    "num_multiprocessors": "MULTIPROCESSORS",
    "fp32_tflops": "TFLOPS_FP32",
    "tf32_tflops": "TFLOPS_TF32",
    "bf16_tflops": "TFLOPS_BF16",
    "memory_gb_s": "GB_S",
    "power_limit_w": "POWER_LIMIT_W",
    "sm_clock_mhz": "SM_CLOCK_MHZ",
    "memory_clock_mhz": "MEMORY_CLOCK_MHZ",
}


def environment(card: Card, num_cards: int = 1, *, others: tuple[Card, ...] = (), **settings: object) -> dict[str, str]:
    """The variables of a machine with these cards, on top of what `python -m tests.driver` sets.

    Args:
        card: what is in the machine.
        num_cards: how many of it.
        others: cards of other kinds behind them, in the order of the bus.
        settings: further settings of `settings.c` by name, without PLAYED_ and in lower case: `nvml_error=9`.

    Raises:
        ValueError: `settings.c` reads no such setting.
    """
    cards = (*[card] * num_cards, *others)
    played = {"DEVICES": len(cards), "CAPABILITY": ";".join("{}.{}".format(*each.capability) for each in cards)}
    for field in fields(Card):
        values = [getattr(each, field.name) for each in cards]
        if field.name in _AS_THEY_ARE:
            played[_AS_THEY_ARE[field.name]] = ";".join(map(str, values))
        elif field.name in _IN_MIB and None not in values:
            played[_IN_MIB[field.name]] = ";".join(str(value / MIB) for value in values)
    if any(each.board_bytes for each in cards):
        played["MIG"] = 1
    played |= {name.upper(): value for name, value in settings.items()}
    if unread := set(played) - set(re.findall(r'"([A-Z][A-Z0-9_]+)"', _SETTINGS.read_text())):
        raise ValueError(
            f"{_SETTINGS.name} reads no PLAYED_{', PLAYED_'.join(sorted(unread))}: see there for the names"
        )
    return {f"PLAYED_{name}": str(value) for name, value in played.items()}
