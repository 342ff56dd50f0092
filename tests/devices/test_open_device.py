"""Names of devices, and what a user reads when there is none."""

import os
import subprocess
import sys

import pytest

import autotune.devices
from autotune.devices import available, open_device
from autotune.devices.cuda import CudaDevice
from autotune.errors import DeviceError
from tests.devices.fake_nvml import GIB, FakeGpu, FakeNvml, install

NO_DRIVER = FakeNvml.NVMLError_LibraryNotFound("NVML Shared Library Not Found")


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(autotune.devices, "torch_has_cuda", lambda: True)


@pytest.fixture
def cpu_build(monkeypatch):
    monkeypatch.setattr(autotune.devices, "torch_has_cuda", lambda: False)


def message(name):
    with pytest.raises(DeviceError) as raised:
        open_device(name)
    return str(raised.value)


def test_names_open_the_devices_they_name(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1"), FakeGpu("GPU-2"))
    opened = {name: open_device(name).name for name in ("cpu", "cuda", "cuda:0", "cuda:1")}
    assert opened == {"cpu": "cpu", "cuda": "cuda:0", "cuda:0": "cuda:0", "cuda:1": "cuda:1"}
    assert [device.name for device in available()] == ["cuda:0", "cuda:1", "cpu"]


def test_auto_is_the_first_gpu_where_there_is_one_else_the_cpu(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1"))
    assert open_device("auto").name == "cuda:0"
    install(monkeypatch, error=NO_DRIVER)
    assert open_device("auto").name == "cpu"
    assert [device.name for device in available()] == ["cpu"]


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "CPU", "", "tpu:0"])
def test_another_name_is_refused_with_what_exists(monkeypatch, cuda_build, name):
    install(monkeypatch, FakeGpu("GPU-1"))
    assert repr(name) in message(name)
    assert "cpu, cuda:0" in message(name)


def test_a_gpu_too_many_is_refused_with_what_exists(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1"), FakeGpu("GPU-2"))
    assert "'cuda:2'" in message("cuda:2")
    assert "cpu, cuda:0, cuda:1" in message("cuda:2")


def test_without_a_driver_the_error_says_so(monkeypatch, cuda_build):
    install(monkeypatch, error=NO_DRIVER)
    assert "no NVIDIA driver is installed" in message("cuda")
    assert "--device cpu" in message("cuda")


def test_a_driver_that_does_not_answer_is_quoted(monkeypatch, cuda_build):
    install(monkeypatch, error=FakeNvml.NVMLError("Driver/library version mismatch"))
    assert "Driver/library version mismatch" in message("cuda")


def test_hidden_gpus_are_explained(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in message("cuda")


def test_a_torch_without_cuda_is_refused_for_a_gpu_and_noted_for_auto(monkeypatch, cpu_build):
    install(monkeypatch, FakeGpu("GPU-1"))
    assert "install a CUDA build" in message("cuda:0")
    device = open_device("auto")
    assert device.name == "cpu"
    assert "install a CUDA build" in device.info().notes[0]
    assert open_device("cpu").info().notes == ()


def test_the_build_of_torch_is_told_rightly_with_and_without_importing_it():
    import torch

    code = "import sys; from autotune import devices; print(devices.torch_has_cuda(), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(torch.version.cuda is not None), "False"]
    assert autotune.devices.torch_has_cuda() == (torch.version.cuda is not None)


def test_a_gpu_is_described_by_the_driver(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1"))
    info = open_device("cuda").info()
    assert (info.name, info.model, info.driver, info.capability) == ("cuda:0", "NVIDIA H200", "550.54.15", (9, 0))
    assert (info.total_bytes, info.free_bytes) == (140 * GIB, 138 * GIB)
    assert info.notes == ()


def test_other_processes_on_a_gpu_are_noted(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1", processes=[(7, 3 * GIB), (os.getpid(), GIB)]))
    (note,) = open_device("cuda").info().notes
    assert "1 other process holds 3.00 GiB of cuda:0 (python3)" in note


def test_gpus_that_differ_are_noted_unless_their_order_is_fixed(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1"), FakeGpu("GPU-2", name="NVIDIA T4"))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in open_device("cuda").info().notes[0]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert open_device("cuda").info().notes == ()


def test_an_instance_of_a_divided_gpu_is_noted(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1", instances=[FakeGpu("MIG-1", name="NVIDIA H200 MIG 1g.18gb")]))
    info = open_device("cuda").info()
    assert info.model == "NVIDIA H200 MIG 1g.18gb"
    assert "MIG" in info.notes[0]


def test_contention_is_what_other_processes_take_of_the_gpu(monkeypatch):
    own, others = (os.getpid(), GIB), (7, GIB)
    install(monkeypatch, FakeGpu("GPU-1", processes=[own, others], process_utilization=[(own[0], 60), (7, 35)]))
    device = CudaDevice(0)
    device.start_measuring()
    assert device.contention() == pytest.approx(0.35)


def test_contention_is_unknown_where_this_process_cannot_be_told_from_others(monkeypatch):
    install(monkeypatch, FakeGpu("GPU-1", processes=[(7, GIB)], process_utilization=[(7, 95)]))
    assert CudaDevice(0).contention() == 0


@pytest.fixture
def allocator(monkeypatch):
    """Says what torch's CUDA allocator has reserved, now and at most, and lets no call reach CUDA."""
    import torch

    def install(*, reserved_bytes, most_bytes):
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: reserved_bytes)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: most_bytes)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        device = CudaDevice(0)
        monkeypatch.setattr(device, "_entered", True)
        return device

    return install


def test_what_is_held_when_memory_runs_out_leaves_out_the_cache_that_was_given_back(monkeypatch, allocator):
    install(monkeypatch, FakeGpu("GPU-1", processes=[(os.getpid(), 4 * GIB)]))
    device = allocator(reserved_bytes=3 * GIB, most_bytes=7 * GIB)
    assert device.held_bytes(2 * GIB) == 4 * GIB
    assert device.peak_bytes() == 8 * GIB


def test_a_gpu_becomes_the_current_one_also_after_another_one_was(monkeypatch, allocator):
    import torch

    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = allocator(reserved_bytes=0, most_bytes=0)
    device.enter()
    device.enter()
    assert chosen == [0, 0]
