"""Which slots of other machines are used together: those like most; of the others it is told why not."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.records.device import DeviceInfo
from autotune.runners.alike import Offer, choose
from autotune.runners.remote import Described
from autotune.version import __version__

UNLIKE = "; measurements of unlike machines are not compared"


def info(**changes: Any) -> DeviceInfo:
    known = {
        "name": "cuda:0",
        "model": "NVIDIA A100",
        "total_bytes": 2**36,
        "free_bytes": 2**36,
        "torch_version": "2.13.0",
    }
    return DeviceInfo(**{**known, **changes})


def offer(autotune: str = __version__, num: int = 1, **changes: Any) -> Offer:
    return Offer(described=Described(device=info(**changes), num_cores=8, autotune=autotune), num=num)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"model": "NVIDIA T4", "total_bytes": 2**34}, f"it has NVIDIA T4 and 16.0 GiB of memory{UNLIKE}"),
        ({"driver": "550.54"}, f"it has the driver 550.54{UNLIKE}"),
        ({"torch_version": "2.12.0"}, f"it has torch 2.12.0{UNLIKE}"),
        ({"num_threads": 3}, f"it has 3 threads{UNLIKE}"),
        ({"free_bytes": 2**35}, f"it has 32.0 GiB of memory free, where another has 64.0 GiB{UNLIKE}"),
        ({"autotune": "0.0.1"}, f"it has autotune 0.0.1, and {__version__} is needed"),
        ({"num": 9}, "it has 8 cores for 9 slots"),
    ],
)
def test_what_is_unlike_most_is_left_out_and_told_why(other: dict[str, Any], why: str) -> None:
    reference, whys = choose([offer(**other), offer(), offer()], None)
    assert reference == info() and whys == [why, "", ""]


def test_of_two_kinds_that_are_as_many_this_machines_own_is_used() -> None:
    there, here = offer(), offer(model="NVIDIA T4")
    assert choose([there, here], None)[0].model == "NVIDIA A100"
    assert choose([there, here], info(model="NVIDIA T4"))[0].model == "NVIDIA T4"
