"""What the management library is asked and how its answers are read, on GPUs that exist on paper."""

import dataclasses

import pytest

from autotune.devices.instruments import Instruments
from autotune.devices.nvml import Nvml
from tests.devices.fake_nvml import GIB, FakeGpu, FakeNvml, install

TWO = (FakeGpu("GPU-aaaa-1"), FakeGpu("GPU-bbbb-2"))
DIVIDED = FakeGpu("GPU-cccc-3", instances=[FakeGpu("MIG-1"), FakeGpu("MIG-2", total_bytes=20 * GIB)])


def visible(gpus, variable, **told):
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    return [gpu.uuid for gpu in Nvml(FakeNvml(*gpus, **told)).visible_gpus(environment)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("1,0", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("1", ["GPU-bbbb-2"]),
        ("GPU-bbbb", ["GPU-bbbb-2"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["GPU-aaaa-1"]),  # the list ends at the first that does not exist
        ("0,0", []),  # as CUDA has it
        ("GPU-", []),  # ambiguous
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(variable, expected):
    assert visible(TWO, variable) == expected


def test_a_gpu_that_is_lost_keeps_its_place_so_that_the_others_keep_their_numbers():
    nvml = Nvml(FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b", name="Tesla T4", lost=True), FakeGpu("GPU-c")))
    first, gone, last = nvml.visible_gpus({})
    assert (first.uuid, last.uuid) == ("GPU-a", "GPU-c")
    assert [nvml.is_lost(gpu) for gpu in (first, gone, last)] == [False, True, False]
    assert not nvml.differ()  # from what is left


def test_of_a_divided_gpu_the_first_instance_is_visible_or_the_one_that_is_named():
    assert visible([DIVIDED], None) == ["MIG-1"]
    assert visible([DIVIDED], "0") == ["MIG-1"]
    assert visible([DIVIDED], "MIG-2") == ["MIG-2"]


DIVIDED_TOO = FakeGpu(
    "GPU-dddd-4",
    instances=[FakeGpu(f"MIG-{number}", gpu_instance=of) for number, of in ((3, 1), (4, 1), (5, 2))],
)


@pytest.mark.parametrize(
    ("variable", "before_570", "since"),
    [
        (None, ["MIG-1"], ["GPU-aaaa-1", "MIG-1", "MIG-2", "MIG-3", "MIG-5"]),
        ("0,2", ["MIG-3"], ["GPU-aaaa-1", "MIG-3"]),
        ("MIG-5,MIG-4,MIG-3", ["MIG-5"], ["MIG-5", "MIG-4"]),
        ("0", ["GPU-aaaa-1"], ["GPU-aaaa-1"]),
    ],
)
def test_a_process_sees_one_instance_and_nothing_else_or_since_driver_570_one_of_each_gpu_instance(
    variable, before_570, since
):
    gpus = (TWO[0], DIVIDED, DIVIDED_TOO)
    assert visible(gpus, variable, driver="565.57.01") == before_570
    assert visible(gpus, variable, driver="570.86.10") == since


def test_parts_of_gpus_may_have_other_numbers_in_cuda_than_in_nvml_where_a_process_sees_several(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    parts = [FakeGpu(f"MIG-{number}", name="NVIDIA H200 MIG 1g.18gb") for number in (1, 2)]
    gpus = (FakeGpu("GPU-1"), FakeGpu("GPU-2", instances=parts))
    assert not Nvml(FakeNvml(*gpus)).differ()  # one part is seen, and nothing else
    assert Nvml(FakeNvml(*gpus, driver="570.86.10")).differ()


def telemetry(gpu, **arguments):
    nvml = Nvml(FakeNvml(gpu))
    return nvml.telemetry(nvml.visible_gpus({})[0], **arguments)


def test_every_instrument_is_read():
    assert telemetry(TWO[0]).values == {
        "gpu_utilization": 37,
        "memory_utilization": 12,
        "used_bytes": 2 * GIB,
        "total_bytes": 140 * GIB,
        "temperature_c": 51,
        "power_w": 312.5,
        "power_limit_w": 700,
        "sm_clock_mhz": 1980,
    }


def test_what_a_gpu_does_not_support_is_missing():
    values = telemetry(FakeGpu("GPU-1", utilization=None, temperature_c=None, power_mw=None)).values
    assert set(values) == {"used_bytes", "total_bytes", "power_limit_w", "sm_clock_mhz"}


def test_the_energy_of_a_gpu_is_read_where_the_driver_counts_it(monkeypatch):
    install(monkeypatch, FakeGpu("GPU-1", energy_mj=1_234_500), FakeGpu("GPU-2"))
    counts, lacks = Instruments(0), Instruments(1)
    assert (counts.counted_j(), counts.why_no_energy(), counts.info().no_energy) == ({"GPU-1": 1234.5}, "", "")
    assert (
        lacks.counted_j() == {}
        and "the driver does not count the energy of cuda:1 (NVIDIA H200)" in lacks.why_no_energy()
    )


def test_the_energy_of_a_whole_board_is_not_told_as_its_instances(monkeypatch):
    install(monkeypatch, dataclasses.replace(DIVIDED, energy_mj=1_000_000))
    device = Instruments(0)
    assert device.counted_j() == {} and "is a part of a GPU (MIG)" in device.info().no_energy


def test_only_reasons_that_slow_the_gpu_down_are_told():
    idle_and_application_clocks = 0x01 | 0x02 | 0x10
    assert telemetry(FakeGpu("GPU-1", reasons=idle_and_application_clocks)).throttle_reasons == ()
    reasons = telemetry(FakeGpu("GPU-1", reasons=0x04 | 0x40 | 0x01)).throttle_reasons
    assert reasons == ("power cap", "temperature (hardware)")


def test_an_older_library_tells_the_reasons_under_their_older_name(monkeypatch):
    older = FakeNvml(FakeGpu("GPU-1", reasons=0x08))
    monkeypatch.setattr(
        FakeNvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda self, gpu: gpu.reasons, raising=False
    )
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    nvml = Nvml(older)
    assert nvml.telemetry(nvml.boards()[0]).throttle_reasons == ("hardware slowdown",)


def test_other_processes_are_listed_with_their_names_but_not_those_left_out():
    gpu = dataclasses.replace(TWO[0], processes=[(10, GIB), (11, 2 * GIB), (10**6, None)])
    listed = telemetry(gpu, without=frozenset({10})).processes
    assert listed == ((11, 2 * GIB, "python3"), (10**6, 0, ""))


def test_a_process_whose_name_is_not_utf_8_is_listed(monkeypatch):
    monkeypatch.setattr(FakeNvml, "nvmlSystemGetProcessName", lambda self, pid: b"/opt/f\xfcr/train")
    ((_, _, name),) = telemetry(dataclasses.replace(TWO[0], processes=[(10, GIB)])).processes
    assert name == "train"


def test_an_instance_has_its_own_memory_and_its_boards_temperature():
    divided = dataclasses.replace(DIVIDED, temperature_c=70, instances=[FakeGpu("MIG-1", total_bytes=20 * GIB)])
    values = telemetry(divided).values
    assert values["total_bytes"] == 20 * GIB
    assert values["temperature_c"] == 70
    assert "gpu_utilization" not in values


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"num_links": 18, "ancestor": 50}, "over NVLink (18 links)"),
        ({"ancestor": 10}, "over one PCIe switch"),
        ({"ancestor": 50}, "over PCIe and the link between processors"),
        ({}, ""),  # the driver does not say
    ],
)
def test_two_gpus_reach_each_other_over_nvlink_or_pcie(changes, path):
    nvml = Nvml(FakeNvml(*(dataclasses.replace(gpu, **changes) for gpu in TWO)))
    assert nvml.path(*nvml.boards()) == path
