from __future__ import annotations

import pytest

from autotune.devices import name_devices
from autotune.errors import DeviceError


def test_one_device_is_the_one_that_is_asked_for() -> None:
    assert name_devices("1", "cpu") == ("cpu",)


@pytest.mark.parametrize(("devices", "device"), [("cpu:2", "auto"), ("cpu:2", "cpu"), ("2", "cpu")])
def test_a_cpu_is_shared_by_processes(devices: str, device: str) -> None:
    assert name_devices(devices, device) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("devices", "device", "said"),
    [
        ("two", "cpu", "names no devices"),
        ("cpu:2", "cuda", "contradict each other"),
        ("all", "cpu", "say how many: cpu:2"),
        ("cpu:0", "cpu", "say how many: cpu:2"),
        ("cpu:0,1", "cpu", "say how many: cpu:2"),
        ("0,1", "cpu", "names no devices"),
        ("2", "cuda:1", "counts devices"),
        ("2x4", "cpu", "are those of several machines, .* A search takes 2x4 where its --runner has several"),
    ],
)
def test_what_names_no_devices_says_what_would(devices: str, device: str, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        name_devices(devices, device)
