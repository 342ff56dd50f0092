"""The slots of a machine: unlike devices are never pooled, and each slot has its own processors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import autotune.devices
from autotune.devices import linux, name_devices, slots
from autotune.devices.linux import cores, processors_near
from autotune.devices.slots import find_slots, shares_of
from autotune.errors import DeviceError
from tests.devices.fake_nvml import GIB, FakeGpu, install

H200, T4 = "NVIDIA H200", "Tesla T4"


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune.devices, "torch_has_cuda", lambda: True)


def machine(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # else torch would be asked for the order of unlike GPUs
    install(monkeypatch, *gpus)


def gpu(number: int, name: str = H200, used_gib: int = 2, *, bus_id: str | None = None, lost: bool = False) -> FakeGpu:
    return FakeGpu(f"GPU-{number}", name=name, used_bytes=used_gib * GIB, bus_id=bus_id, lost=lost)


def on_processors(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As many processors, each a core of its own."""
    monkeypatch.setattr(linux, "processors", lambda: set(range(number)))
    monkeypatch.setattr(slots, "cores", lambda numbers: [(one,) for one in sorted(numbers)])


def names(asked: str, device: str = "auto", **limits: int) -> list[str]:
    return [slot.name for slot in find_slots(asked, device, **limits).slots]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [("all", ["cuda:0", "cuda:1", "cuda:2"]), ("2", ["cuda:0", "cuda:1"]), ("cuda:2,0", ["cuda:2", "cuda:0"])],
)
def test_gpus_are_asked_for_by_number_by_name_or_all(
    monkeypatch: pytest.MonkeyPatch, asked: str, expected: list[str]
) -> None:
    machine(monkeypatch, gpu(0), gpu(1), gpu(2))
    assert names(asked) == expected


def test_unlike_gpus_are_never_pooled_and_most_of_a_kind_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0, T4), gpu(1), gpu(2))
    found = find_slots("all")
    assert [slot.name for slot in found.slots] == ["cuda:1", "cuda:2"]
    assert "cuda:0 (Tesla T4) left out; --device cuda:0 uses that kind" in found.notes[0]


def test_the_kind_of_a_device_that_is_named_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0, T4), gpu(1), gpu(2))
    assert names("all", "cuda:0") == ["cuda:0"]


def test_a_gpu_whose_memory_others_hold_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0), gpu(1, used_gib=100), gpu(2))
    found = find_slots("all")
    assert [slot.name for slot in found.slots] == ["cuda:0", "cuda:2"]
    assert found.notes[0].startswith("cuda:1 is no slot: 40.0 GiB of its 140 GiB are free")


def test_a_gpu_that_the_driver_has_lost_is_left_out_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0), gpu(1, lost=True), gpu(2))
    found = find_slots("all")
    assert [slot.name for slot in found.slots] == ["cuda:0", "cuda:2"]
    assert found.notes == ("cuda:1 is no slot: it has fallen off the bus, as the driver says",)
    with pytest.raises(DeviceError, match="cuda:1 has fallen off the bus, as the driver says; check nvidia-smi"):
        find_slots("cuda:0,1")


def test_a_gpu_that_goes_is_known_to_be_lost_to_whoever_had_opened_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, first := gpu(0), gpu(1))
    opened = autotune.devices.device_named("cuda:0")
    assert opened.info().name == "cuda:0" and not opened.is_lost()
    first.lost = True
    assert opened.is_lost() and not autotune.devices.device_named("cuda:1").is_lost()


def test_of_parts_of_gpus_only_those_are_slots_that_the_driver_shows_and_it_is_said_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = gpu(0), FakeGpu("GPU-1", instances=[FakeGpu("MIG-1", H200), FakeGpu("MIG-2", H200)])
    machine(monkeypatch, *gpus)
    why = "the driver 550.54.15 shows a process one MIG instance and no other GPU"
    found = find_slots("all")
    assert [slot.name for slot in found.slots] == ["cuda:0"] and why in found.notes[0]
    for ask in (find_slots, name_devices):
        with pytest.raises(DeviceError, match=why):
            ask("2")
    install(monkeypatch, *gpus, driver="570.86.10")
    assert names("all") == ["cuda:0", "cuda:1", "cuda:2"] and not find_slots("all").notes


def test_within_a_memory_limit_a_fuller_gpu_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu(0), gpu(1, used_gib=100), gpu(2))
    assert names("all", memory_limit_bytes=30 * GIB) == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(DeviceError, match=r"no slot has the 200 GiB of --memory-limit free \(the most is 138 GiB\)"):
        find_slots("all", memory_limit_bytes=200 * GIB)


def test_each_gpu_has_an_equal_share_of_the_cores_of_its_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    near: Mapping[str, set[int]] = {"a": {0, 1, 2, 3}, "b": {4, 5, 6, 7}}
    on_processors(monkeypatch, 8)
    monkeypatch.setattr(linux, "processors_near", lambda bus_id: near[bus_id])
    machine(monkeypatch, gpu(0, bus_id="a"), gpu(1, bus_id="a"), gpu(2, bus_id="b"))
    found = find_slots("all").slots
    assert [sorted(slot.processors) for slot in found] == [[0, 1], [2, 3], [4, 5]]
    assert {slot.num_sharing for slot in found} == {3}


def test_gpus_with_fewer_cores_than_slots_share_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    on_processors(monkeypatch, 1)
    machine(monkeypatch, gpu(0), gpu(1))
    assert [slot.processors for slot in find_slots("all").slots] == [{0}, {0}]


def test_a_cpu_is_parted_into_as_many_cores_for_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    on_processors(monkeypatch, 5)
    found = find_slots("cpu:2")
    assert [(slot.name, slot.device, sorted(slot.processors)) for slot in found.slots] == [
        ("cpu:0", "cpu", [0, 1]),
        ("cpu:1", "cpu", [2, 3]),
    ]
    assert "each of the 2 slots trains on 2 of 5 cores" in found.notes[0] and "OMP_NUM_THREADS=2" in found.notes[0]
    assert names("2", "cpu") == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize(
    ("asked", "device", "says"),
    [
        ("gpu", "auto", "'gpu' names no slots"),
        ("cuda:", "auto", "'cuda:' names no slots"),
        ("cuda:0", "cpu", "contradict each other"),
        ("cuda:0,0", "auto", "expected different GPUs"),
        ("cuda:7", "auto", "there is no device 'cuda:7'"),
        ("0", "auto", "a number from 1 to 2"),
        ("3", "auto", "a number from 1 to 2"),
        ("all", "cpu", "say how many: --slots cpu:4"),
        ("cpu:0,1", "auto", "say how many"),
        ("cpu:9", "auto", "expected at most 4"),
    ],
)
def test_what_names_no_slots_is_refused_with_what_does(
    monkeypatch: pytest.MonkeyPatch, asked: str, device: str, says: str
) -> None:
    on_processors(monkeypatch, 4)
    machine(monkeypatch, gpu(0), gpu(1))
    with pytest.raises(DeviceError) as raised:
        find_slots(asked, device)
    assert says in str(raised.value)


def test_threads_of_a_core_stay_together_and_cores_of_a_node_too(tmp_path: Path) -> None:
    for number, core in enumerate((0, 1, 0, 1)):  # 0 and 2 are threads of one core
        topology = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core}\n")
    assert cores({0, 1, 2, 3}, tmp_path) == [(0, 2), (1, 3)]
    for node, numbers in (("node0", "1,3"), ("node1", "0,2")):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
        (tmp_path / "sys/devices/system/node" / node / "cpulist").write_text(numbers)
    assert cores({0, 1, 2, 3}, tmp_path) == [(1, 3), (0, 2)]
    assert shares_of([(1, 3), (0, 2)], 2) == [{1, 3}, {0, 2}]


def test_the_kernel_tells_the_processors_near_a_gpu(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text("0-2,8\n")
    assert processors_near("00000000:3B:00.0", tmp_path) == {0, 1, 2, 8}
    assert processors_near("00000000:5E:00.0", tmp_path) == set()
