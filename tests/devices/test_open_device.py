"""Names of devices, and what a user reads when there is none."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import autotune.devices
from autotune.devices import Telemetry, available, instruments, open_device
from autotune.devices.cuda import CudaDevice
from autotune.errors import DeviceError
from autotune.records.device import DeviceInfo
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


def test_the_build_of_torch_is_told_while_another_thread_imports_it():
    code = """
import sys, threading
from autotune import devices
threading.Thread(target=__import__, args=("torch",)).start()
while "torch" not in sys.modules:
    pass
print(devices.torch_has_cuda())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == [str(autotune.devices.torch_has_cuda())], run.stderr


def test_a_gpu_is_described_by_the_driver(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1"))
    info = open_device("cuda").info()
    assert (info.name, info.model, info.driver, info.capability) == ("cuda:0", "NVIDIA H200", "550.54.15", (9, 0))
    assert (info.total_bytes, info.free_bytes) == (140 * GIB, 138 * GIB)
    assert info.notes == ()


def test_other_processes_on_a_gpu_are_noted(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1", processes=[(7, 3 * GIB), (os.getpid(), GIB)]))
    (note,) = open_device("cuda").info().notes
    assert "1 other process holds 3.00 GiB of cuda:0 " in note


def answering(monkeypatch, *gpus, why=""):
    """Torch, when asked in another process, shows these GPUs. Returns a list that grows with each question."""
    asked_for = []

    def ask():
        asked_for.append(1)
        return instruments.Answer(gpus=gpus, why=why)

    monkeypatch.setattr(instruments, "_answers", {})
    monkeypatch.setattr(instruments, "_ask", ask)
    return asked_for


def seen_by_torch(name, uuid, total_bytes=24 * GIB):
    info = DeviceInfo(
        name="cuda:0",
        model=name,
        total_bytes=total_bytes,
        free_bytes=total_bytes,
        capability=(8, 9),
        num_multiprocessors=128,
    )
    return instruments.AskedGpu(uuid=uuid, info=info)


def test_of_gpus_that_differ_cuda_says_which_is_the_first(monkeypatch, cuda_build):
    t4 = FakeGpu("GPU-2", name="NVIDIA T4", total_bytes=15 * GIB, used_bytes=0, capability=(7, 5))
    install(monkeypatch, t4, FakeGpu("GPU-1"))
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    asked_for = answering(monkeypatch, seen_by_torch("NVIDIA H200", "1"), seen_by_torch("NVIDIA T4", "2"))
    infos = [open_device(name).info() for name in ("cuda:0", "cuda:1")]
    assert [(info.model, info.capability) for info in infos] == [("NVIDIA H200", (9, 0)), ("NVIDIA T4", (7, 5))]
    assert [info.free_bytes for info in infos] == [138 * GIB, 15 * GIB]
    assert len(asked_for) == 1
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert open_device("cuda:0").info().model == "NVIDIA T4"
    assert len(asked_for) == 1


def test_boards_are_enumerated_once_not_at_every_reading(monkeypatch):
    install(monkeypatch, FakeGpu("GPU-1"))
    device = CudaDevice(0)
    device.info()
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetCount", lambda: pytest.fail("enumerated again"))
    assert device.telemetry().values and device.info()
    device.settle()
    assert device.contention() == 0


@pytest.fixture
def device_file(monkeypatch, tmp_path):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(instruments, "_SIGNS", (str(tmp_path / "nvidiactl"),))


def test_where_nvml_is_missing_torch_is_asked_for_its_gpus(monkeypatch, cuda_build, device_file):
    install(monkeypatch, error=NO_DRIVER)
    monkeypatch.setattr("sys.modules", {name: module for name, module in sys.modules.items() if name != "torch"})
    answering(monkeypatch, seen_by_torch("AMD Instinct MI300X", ""))
    device = open_device("auto")
    info = device.info()
    assert (info.name, info.model, info.free_bytes) == ("cuda:0", "AMD Instinct MI300X", 24 * GIB)
    assert "known from torch alone" in info.notes[0]
    assert (device.telemetry(), device.contention(), device.slowdowns()) == (Telemetry(), 0, ())
    device.settle()


def test_a_gpu_whose_driver_does_not_report_its_memory_is_asked_of_torch(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1", name="NVIDIA GB10"))
    monkeypatch.delattr(sys.modules["pynvml"].__class__, "nvmlDeviceGetMemoryInfo")
    answering(monkeypatch, seen_by_torch("NVIDIA GB10", "1", total_bytes=120 * GIB))
    info = open_device("cuda").info()
    assert (info.model, info.free_bytes) == ("NVIDIA GB10", 120 * GIB)
    assert "does not report its memory" in info.notes[0]


def test_a_sign_of_a_gpu_that_nobody_finds_is_told_loudly(monkeypatch, cuda_build, device_file):
    install(monkeypatch, error=NO_DRIVER)
    monkeypatch.setattr("sys.modules", {name: module for name, module in sys.modules.items() if name != "torch"})
    answering(monkeypatch, why="The NVIDIA driver on your system is too old (found version 11040)")
    device = open_device("auto")
    assert device.name == "cpu"
    assert (
        "the GPU is not used: " in device.info().notes[0]
        and "driver on your system is too old" in device.info().notes[0]
    )
    assert "too old" in message("cuda")


def test_torch_is_not_asked_without_a_sign_of_a_gpu_or_where_it_is_hidden(monkeypatch, cuda_build, device_file):
    install(monkeypatch, error=NO_DRIVER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked_for = answering(monkeypatch)
    assert open_device("auto").info().notes == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(instruments, "_SIGNS", ())
    assert open_device("auto").info().notes == ()
    assert not asked_for


def test_torch_really_answers_in_a_process_of_its_own():
    import torch

    answer = instruments._ask()
    assert len(answer.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_a_build_for_rocm_counts_as_one_that_can_use_a_gpu(monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'\n")
    monkeypatch.setattr("sys.modules", {name: module for name, module in sys.modules.items() if name != "torch"})
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(autotune.devices.util, "find_spec", lambda name: spec)
    assert autotune.devices.torch_has_cuda()


def test_an_nvml_that_raises_what_is_no_nvml_error_is_read_as_far_as_it_goes(monkeypatch, cuda_build):
    class NVMLLibraryMismatchError(Exception):
        pass

    def mismatch(gpu):
        raise NVMLLibraryMismatchError("Unversioned function called")

    install(monkeypatch, FakeGpu("GPU-1", processes=[(7, GIB)]))
    module = sys.modules["pynvml"]
    older = module.nvmlDeviceGetComputeRunningProcesses
    monkeypatch.setattr(module, "nvmlDeviceGetComputeRunningProcesses", mismatch)
    assert open_device("cuda").telemetry().processes == ()
    monkeypatch.setattr(module, "nvmlDeviceGetComputeRunningProcesses_v2", older, raising=False)
    assert [pid for pid, _, _ in open_device("cuda").telemetry().processes] == [7]


def test_an_instance_of_a_divided_gpu_is_noted(monkeypatch, cuda_build):
    install(monkeypatch, FakeGpu("GPU-1", instances=[FakeGpu("MIG-1", name="NVIDIA H200 MIG 1g.18gb")]))
    info = open_device("cuda").info()
    assert info.model == "NVIDIA H200 MIG 1g.18gb"
    assert "MIG" in info.notes[0]


def test_contention_is_what_other_processes_take_of_the_gpu(monkeypatch):
    own, others = (os.getpid(), GIB), (7, GIB)
    install(
        monkeypatch,
        FakeGpu("GPU-1", processes=[own, others], process_utilization=[(own[0], 60), (7, 35), (8, 2**32 - 1)]),
    )
    device = CudaDevice(0)
    device.start_measuring()
    assert device.contention() == pytest.approx(0.35)


def test_contention_is_unknown_where_this_process_cannot_be_told_from_others(monkeypatch):
    install(monkeypatch, FakeGpu("GPU-1", processes=[(7, GIB)], process_utilization=[(7, 95)]))
    assert CudaDevice(0).contention() == 0


@pytest.mark.parametrize(("pid", "others"), [(os.getpid(), (7,)), (31_337, ())], ids=["own", "another"])
def test_with_process_numbers_of_another_namespace_nobody_is_said_to_be_another_process(monkeypatch, pid, others):
    import torch

    install(monkeypatch, FakeGpu("GPU-1", processes=[(7, GIB), (pid, GIB)]))
    device = CudaDevice(0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("autotune.devices.instruments.uuid_of", lambda index: "1")
    assert tuple(other for other, _, _ in device.telemetry().processes) == others
