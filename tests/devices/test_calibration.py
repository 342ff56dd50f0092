"""A device is measured in a child that can be killed: what hangs, crashes or does not exist costs that figure alone."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.devices import available, calibration, open_device
from autotune.devices.calibration import holds_for, measure
from autotune.devices.cpu import CpuDevice
from autotune.devices.cuda import CudaDevice
from autotune.errors import DeviceError
from autotune.records.device import Calibration
from autotune.runners import worker
from autotune.runners.jobs import CalibrateJob
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from tests.devices.fake_nvml import FakeGpu, install
from tests.devices.processes import in_process

TINY = Path(__file__).parent.parent / "models" / "tiny.py"
ARITHMETICS = ("fp32", "bf16", "fp16")


# What a figure takes, and all of them, on a machine on which many others run.
PATIENT = {
    "ON_HOST": replace(calibration.ON_HOST, total_s=300.0, step_s=60.0),
    "ON_CARD": replace(calibration.ON_CARD, total_s=300.0, step_s=60.0),
}


def measured(device, **changed):
    """What `measure` finds with all the time that it needs, and with some of its module's names changed.

    It forks, which must not be done where a backward pass has run: in a torch that was built for GPUs that may have
    started threads.
    """

    def measure_changed():
        for name, value in {**PATIENT, **changed}.items():
            setattr(calibration, name, value)
        return measure(device)

    return in_process(measure_changed)


def tried(found: Calibration) -> set[tuple[str, str]]:
    return {(rate.work, rate.arithmetic) for rate in found.rates}


def test_every_rate_of_a_cpu_is_measured_at_rising_sizes():
    found = measured(open_device("cpu"), RUN_S=0.5)  # a run that others interrupt is no reason to stop
    assert tried(found) == {(work, arithmetic) for work in ("matmul", "convolution") for arithmetic in ARITHMETICS}
    for rate in found.rates:
        # where a type is slow, as fp16 convolutions are on many processors, the next size would take too long
        assert rate.failure or len(rate.sizes) > 1 or rate.flops_per_s[0] < found.best(rate.work, "fp32") / 20
        assert list(rate.sizes) == sorted(rate.sizes)
        assert all(flops > 0 for flops in rate.flops_per_s)
    assert found.gain("matmul", "fp32") == 1.0
    assert min(found.bytes_per_s, found.launch_s, found.allocation_s) > 0
    assert found.host_to_device_bytes_per_s is None
    assert Calibration.from_dict(found.to_dict()) == found


def broken(what):
    """Makes the convolutions in bf16 do something."""
    convolution = calibration._convolution

    def instead(device, arithmetic, channels):
        run, flops = convolution(device, arithmetic, channels)
        return (what if arithmetic == "bf16" else run), flops

    return instead


@pytest.mark.parametrize(
    ("what", "failure"),
    [
        (lambda: time.sleep(60), "no answer"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "no answer"),
        (lambda: {}["bf16"], "bf16"),
    ],
    ids=["hangs", "crashes", "raises"],
)
def test_a_figure_that_fails_does_not_cost_the_others(what, failure):
    found = measured(open_device("cpu"), _convolution=broken(what), ON_HOST=replace(PATIENT["ON_HOST"], step_s=2.5))
    assert found.rate("convolution", "bf16").sizes == ()
    assert failure in found.rate("convolution", "bf16").failure
    assert found.gain("convolution", "bf16") == 0.0
    assert found.rate("convolution", "fp16").sizes
    assert found.rate("matmul", "bf16").sizes


def test_memory_that_is_short_says_nothing_of_a_type():
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    found = measured(open_device("cpu"), _convolution=broken(fail))
    assert found.rate("convolution", "bf16").failure == ""
    assert found.gain("convolution", "bf16") is None
    assert found.rate("convolution", "fp16").sizes


def test_a_gpu_has_more_time_for_a_figure_since_it_loads_kernels_when_they_are_first_used():
    load_s = 0.5
    assert calibration.ON_HOST.step_s < load_s < calibration.ON_CARD.step_s / 2  # two runs are one step

    def loads():
        time.sleep(load_s)

    found = measured(LikeGpu(), _convolution=broken(loads), **SMALL)
    assert len(found.rate("convolution", "bf16").sizes) == 1
    assert found.gain("convolution", "bf16") > 0


def test_when_the_time_is_up_the_rest_is_missing():
    found = measured(open_device("cpu"), ON_HOST=replace(PATIENT["ON_HOST"], total_s=0.0))
    assert found.rates == () and found.bytes_per_s is None
    assert found.gain("matmul", "bf16") is None


class Unusable(CpuDevice):
    """A device whose driver fails."""

    def enter(self):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.\nTo use CUDA ...")


def test_a_device_that_cannot_be_entered_says_why():
    with pytest.raises(DeviceError, match="RuntimeError: Cannot re-initialize CUDA in forked"):
        measure(Unusable())  # which runs nothing


def test_the_process_that_forks_counts_no_gpus(monkeypatch):
    """Counting would initialise the driver where NVML is missing, and a fork could not use the GPU then."""
    opened = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("the GPUs were counted"))
    monkeypatch.setattr(calibration, "measure", lambda device: opened.append(device.name) or Calibration())
    install(monkeypatch, error=OSError("no NVML"))
    monkeypatch.setattr("autotune.devices.is_there_a_sign_of_a_gpu", lambda: True)
    monkeypatch.setattr("autotune.devices.torch_has_cuda", lambda: True)
    for name in ("cpu", "cuda:0", "cuda:1"):
        worker._calibrate(None, {"device": name}, lambda progress: None)
    assert opened == ["cpu", "cuda:0", "cuda:1"]


class LikeGpu(CpuDevice):
    """A GPU's figures on the processor: what needs a card fails, and everything else runs."""

    capabilities = CudaDevice.capabilities

    def info(self):
        return replace(super().info(), capability=(9, 0))


SMALL = {
    "ON_HOST": replace(PATIENT["ON_HOST"], copied_bytes=2**20),
    "ON_CARD": replace(PATIENT["ON_CARD"], matmul_rows=(32, 64), channels=(8, 16), images=(2, 8), copied_bytes=2**20),
}


def test_a_gpus_figures_are_measured_as_far_as_they_exist_and_what_does_not_says_why():
    found = measured(LikeGpu(), **SMALL)
    assert tried(found) >= {("matmul", name) for name in ("fp32", "tf32", "bf16", "fp16", "fp8")}
    for name in ("fp32", "tf32", "bf16"):
        assert found.rate("matmul", name).sizes, name
    fp8 = found.rate("matmul", "fp8")
    assert fp8.sizes or fp8.failure
    assert found.bytes_per_s and found.launch_s
    assert torch.cuda.is_available() or found.host_to_device_bytes_per_s is None


def test_what_takes_long_already_when_it_is_small_is_not_tried_larger():
    convolution = calibration._convolution

    def slow(device, arithmetic, channels):
        run, flops = convolution(device, arithmetic, channels)
        return (lambda: time.sleep(0.02)) if arithmetic == "fp16" else run, flops

    found = measured(open_device("cpu"), _convolution=slow).rate("convolution", "fp16")
    assert len(found.sizes) == 1
    assert not found.failure


def test_a_calibration_holds_for_a_driver_a_torch_a_power_limit_threads_and_arithmetic(monkeypatch):
    install(monkeypatch, FakeGpu("GPU-1"))
    gpu, cpu = (device.info() for device in available())
    assert holds_for(gpu)["power_limit"] == "700 W"
    for info, change in (
        (gpu, {"driver": "999.1"}),
        (gpu, {"torch_version": "9.9"}),
        (gpu, {"power_limit_w": 350.0}),
        (cpu, {"num_threads": 77}),
    ):
        assert holds_for(replace(info, **change)) != holds_for(info)
    assert holds_for(replace(cpu, free_bytes=1, total_bytes=2)) == holds_for(cpu)
    before = holds_for(cpu)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert holds_for(cpu) != before


@pytest.mark.gpu
def test_every_rate_of_a_gpu_is_measured_without_a_context_in_this_process(tmp_path):
    with LocalRunner(
        TaskSource.of(TINY), device="cuda", logs=tmp_path
    ) as runner:  # forks where nothing holds a context
        found = runner.run(CalibrateJob())
    assert isinstance(found, Calibration), found
    for work, name in (("matmul", "fp32"), ("matmul", "fp16"), ("convolution", "fp32"), ("convolution", "fp16")):
        assert found.best(work, name), (work, name)
    assert found.host_to_device_bytes_per_s and found.bytes_per_s and found.launch_s
    assert found.of["power_limit"] and found.of["driver"]


def test_it_says_for_how_long_others_held_the_device():
    class Shared(CpuDevice):
        def contention(self):
            return 0.4

    assert measured(Shared()).contention == 0.4
    assert 0 <= measured(open_device("cpu")).contention <= 1
