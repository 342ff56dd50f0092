"""A GPU that is not there."""

from __future__ import annotations

from dataclasses import asdict

from autotune.devices.absent import AbsentGpu
from autotune.records.device import DeviceInfo
from autotune.units import GIB, MIB

T4 = DeviceInfo(name="cuda", model="T4 16GB", total_bytes=15 * GIB, free_bytes=15 * GIB, capability=(7, 5))


def test_it_says_what_it_was_described_as_and_works_on_the_cpu() -> None:
    device = AbsentGpu(T4)
    assert (device.kind, device.info()) == ("cuda", T4)
    assert device.torch_device.type == "cpu"


def test_a_process_on_it_is_taken_to_hold_a_cuda_context() -> None:
    assert 256 * MIB < AbsentGpu(T4).current_bytes() < 1024 * MIB


def test_a_description_survives_the_way_into_another_process() -> None:
    assert DeviceInfo.from_dict({**asdict(T4), "capability": [7, 5], "notes": []}) == T4
