"""Measures a device in seconds: rates of arithmetic by type, memory bandwidth, launching, copying, allocating.

A child process reports each figure as soon as it has it. A child that takes too long is killed, and another one goes on with the
next figure: emulated arithmetic is a hundred times slower, and a hanging kernel cannot be stopped in any other way.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

from autotune.devices.base import Device
from autotune.errors import DeviceError, first_line, in_one_line
from autotune.lazy import torch
from autotune.records.device import BF16, CONVOLUTION, FP8, FP16, FP32, MATMUL, TF32, Calibration, DeviceInfo, Rate
from autotune.units import MIB, format_seconds

START_S = 20.0  # a child that is not ready after so long is killed
RUN_S = 0.02  # a size is measured if one run is expected to take no longer
TIMED_S = 0.01  # runs are repeated for so long, at least `LEAST_RUNS` times, and the best one counts
LEAST_RUNS = 3
ALLOCATED_BYTES = 32 * MIB
NUM_LAUNCHES = 1000
FP8_CAPABILITY = (8, 9)
# environment variables that change a device's arithmetic
VARIABLES = (
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much is measured, and how long it may take.

    Attributes:
        total_s: seconds of measuring, after a GPU's context and the libraries' first use.
        step_s: a child that has reported no further figure, or size of a figure, for so long is killed. A GPU loads each
            kernel when it is first used.
        warm_s: seconds of work beforehand, in which a GPU raises its clock.
        images: number of images, and their number of rows, which is that of columns.
    """

    total_s: float
    step_s: float
    warm_s: float
    matmul_rows: tuple[int, ...]
    channels: tuple[int, ...]
    images: tuple[int, int]
    copied_bytes: int


ON_HOST = Extent(
    total_s=3.0,
    step_s=0.3,
    warm_s=0.0,
    matmul_rows=(64, 128, 256, 512, 1024, 2048),
    channels=(16, 32, 64, 128, 256),
    images=(2, 16),
    copied_bytes=64 * MIB,
)
ON_CARD = Extent(
    total_s=6.0,
    step_s=3.0,
    warm_s=0.1,
    matmul_rows=(256, 1024, 2048, 4096, 8192),
    channels=(32, 64, 128, 256),
    images=(32, 56),
    copied_bytes=512 * MIB,
)

Message = dict[str, Any]
Figure = Callable[[], Iterator[Message]]


def _extent(device: Device) -> Extent:
    return ON_CARD if device.capabilities.own_processors else ON_HOST


def holds_for(info: DeviceInfo) -> dict[str, str]:
    """The circumstances that a calibration of the device, made here and now, holds for."""
    known = {
        "device": f"{info.name} {info.model}",
        "driver": info.driver,
        "torch": info.torch_version,
        "power_limit": f"{info.power_limit_w:.0f} W" if info.power_limit_w else "",
        "threads": str(info.num_threads or ""),
    }
    return {**known, **{name: os.environ[name] for name in (*VARIABLES, *THREADS) if name in os.environ}}


def communicators_hold_for(info: DeviceInfo, num_processes: int) -> dict[str, str]:
    """The circumstances that measured `Communicators` hold for, here and now: any of a machine's cards of one model will do.

    Args:
        num_processes: that train together.
    """
    known = {
        "model": info.model,
        "driver": info.driver,
        "torch": info.torch_version,
        "processes": str(num_processes),
    }
    return {**known, **{name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}}


def arithmetic() -> dict[str, str]:
    """The environment variables that change a device's arithmetic, with their values; empty for those not set."""
    return {name: os.environ.get(name, "") for name in VARIABLES}


def measure(device: Device) -> Calibration:
    """Measure the device, for little more than its `total_s`. What fails is missing, with the reason, unless memory was short.

    This process forks, so it must have only one thread and no CUDA context.

    Raises:
        DeviceError: the device cannot be used at all.
    """
    info = device.info()
    figures = _figures(device, info)
    found: dict[str, list[Message]] = {name: [] for name in figures}
    failures: dict[str, str] = {}
    left, measured_s, total_s, contention = list(figures), 0.0, _extent(device).total_s, 0.0
    while left and measured_s < total_s:
        began_s = math.inf
        for message in _told_by_child(device, {name: figures[name] for name in left}, total_s - measured_s):
            if "ready" in message:
                began_s = time.monotonic()
            elif "unusable" in message:
                raise DeviceError(message["unusable"])
            elif "ended" in message:
                failures[left.pop(0)] = message["why"]
                contention = message["contention"]
            else:
                found[left[0]].append(message)
        if began_s == math.inf:
            break
        measured_s += time.monotonic() - began_s
        if left and measured_s < total_s:
            if left[0] not in failures:  # the machine may have been busy: once more, at the end
                left.append(left[0])
                found[left[0]].clear()
            failures[left.pop(0)] = f"no answer within {format_seconds(_extent(device).step_s)}"
    values = {name: messages[0]["value"] for name, messages in found.items() if messages and "value" in messages[0]}
    return Calibration(
        rates=tuple(_rate(name, found[name], failures[name]) for name in failures if " " in name),
        **values,
        of=holds_for(info),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        wall_s=measured_s,
        contention=contention,
    )


def _rate(name: str, steps: list[Message], failure: str) -> Rate:
    work, arithmetic = name.split()
    sizes, rates = tuple(step["size"] for step in steps), tuple(step["flops_per_s"] for step in steps)
    return Rate(work=work, arithmetic=arithmetic, sizes=sizes, flops_per_s=rates, failure=failure)


def _told_by_child(device: Device, figures: Mapping[str, Figure], most_s: float) -> Iterator[Message]:
    """A child's messages about the figures. The child is killed where no figure comes in time, or after `most_s` seconds."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        _measure_in_child(device, figures, writer)
    os.close(writer)
    unread, wait_s, end_s = b"", START_S, math.inf
    try:
        while select.select([reader], [], [], max(0.0, wait_s))[0] and (data := os.read(reader, 65536)):
            if end_s == math.inf:
                end_s = time.monotonic() + most_s
            *lines, unread = (unread + data).split(b"\n")
            yield from map(json.loads, lines)
            wait_s = min(_extent(device).step_s, end_s - time.monotonic())
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _measure_in_child(device: Device, figures: Mapping[str, Figure], writer: int) -> NoReturn:
    def tell(message: Message) -> None:
        os.write(writer, json.dumps(message).encode() + b"\n")

    try:
        device.enter()
        _warm_up(device)
        device.start_measuring()
        tell({"ready": True})
        for figure in figures.values():
            why = ""
            try:
                for message in figure():
                    tell(message)
            except Exception as error:  # a type that this torch, or this device, does not have
                short = device.is_out_of_memory(error)  # says nothing of the type
                why = "" if short else first_line(error)[:200]
            tell({"ended": True, "why": why, "contention": device.contention()})
    except Exception as error:  # before the first figure
        tell({"unusable": in_one_line(error)[:200]})
    finally:
        os._exit(0)


def _warm_up(device: Device) -> None:
    extent, started_s = _extent(device), time.monotonic()
    multiply, _ = _matmul(device, FP32, extent.matmul_rows[0])
    convolve, _ = _convolution(device, FP32, extent.channels[0])
    multiply()
    convolve()
    while time.monotonic() < started_s + extent.warm_s:
        multiply()
        device.synchronize()


def _figures(device: Device, info: DeviceInfo) -> dict[str, Figure]:
    """What to measure, the most telling figures first."""
    figures: dict[str, Figure] = {}
    rows, channels = _extent(device).matmul_rows, _extent(device).channels

    def add(work: str, arithmetic: str, make: Callable[[Device, str, int], Work], sizes: tuple[int, ...]) -> None:
        figures[f"{work} {arithmetic}"] = partial(_rising, device, partial(make, device, arithmetic), sizes)

    for arithmetic in (FP32, BF16, FP16):
        add(MATMUL, arithmetic, _matmul, rows)
        add(CONVOLUTION, arithmetic, _convolution, channels)
        if arithmetic == FP32:
            figures["bytes_per_s"] = partial(_copying, device)
            figures["launch_s"] = partial(_launching, device)
            figures["allocation_s"] = partial(_allocating, device)
    if device.capabilities.page_locked:
        figures["host_to_device_bytes_per_s"] = partial(_uploading, device)
    if device.capabilities.tf32:
        add(MATMUL, TF32, _matmul, rows)
    if info.capability >= FP8_CAPABILITY:
        add(MATMUL, FP8, _matmul, rows)
    return figures


Work = tuple[Callable[[], object], float]  # a function that does it once, and its FLOPs


def _rising(device: Device, made: Callable[[int], Work], sizes: tuple[int, ...]) -> Iterator[Message]:
    """The rate at each size, as long as the next one is expected to take no longer than `RUN_S`."""
    took_s = before = 0.0
    for size in sizes:
        run, flops = made(size)
        if before and took_s * flops / before > RUN_S:
            return
        took_s, before = _best_s(device, run), flops
        yield {"size": size, "flops_per_s": flops / took_s}


def _best_s(device: Device, run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs: whatever else the machine does only makes them slower."""
    best_s, started_s, num_runs = math.inf, time.perf_counter(), 0
    device.synchronize()
    while num_runs < LEAST_RUNS or time.perf_counter() < started_s + TIMED_S:
        before_s = time.perf_counter()
        run()
        device.synchronize()
        best_s, num_runs = min(best_s, time.perf_counter() - before_s), num_runs + 1
    return best_s


def _tensor(device: Device, arithmetic: str, *shape: int) -> torch.Tensor:
    """Random values: ones would spare a GPU power."""
    types = {BF16: torch.bfloat16, FP16: torch.float16, FP8: torch.float8_e4m3fn}
    return torch.randn(shape, device=device.torch_device).to(types.get(arithmetic, torch.float32))


def _matmul(device: Device, arithmetic: str, rows: int) -> Work:
    """A product of square matrices. fp8 matrices are scaled by one number each, and their product is in bf16."""
    torch.set_float32_matmul_precision("high" if arithmetic == TF32 else "highest")
    matrix, flops = _tensor(device, arithmetic, rows, rows), 2.0 * rows**3
    if arithmetic == FP8:
        scale = torch.ones((), device=device.torch_device)
        multiply = partial(torch._scaled_mm, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
        return lambda: multiply(matrix, matrix.t()), flops
    return lambda: matrix @ matrix, flops


def _convolution(device: Device, arithmetic: str, channels: int) -> Work:
    """A 3x3 convolution with its backward pass, as training runs it: three times the FLOPs of the forward pass."""
    number, rows = _extent(device).images
    images, gradient = (_tensor(device, arithmetic, number, channels, rows, rows) for _ in range(2))
    weight = _tensor(device, arithmetic, channels, channels, 3, 3)
    images.requires_grad_()
    weight.requires_grad_()

    def run() -> None:
        result = torch.nn.functional.conv2d(images, weight, padding=1)
        torch.autograd.grad(result, (images, weight), gradient)

    return run, 3 * 2.0 * number * rows**2 * channels**2 * 9


def _copying(device: Device) -> Iterator[Message]:
    source = torch.ones(_extent(device).copied_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    yield {"value": 2 * source.numel() / _best_s(device, lambda: target.copy_(source))}


def _launching(device: Device) -> Iterator[Message]:
    number = torch.ones((), device=device.torch_device)

    def run() -> None:
        for _ in range(NUM_LAUNCHES):
            number.add_(1)

    yield {"value": _best_s(device, run) / NUM_LAUNCHES}


def _allocating(device: Device) -> Iterator[Message]:
    allocate = partial(torch.empty, ALLOCATED_BYTES, dtype=torch.uint8, device=device.torch_device)
    yield {"value": _best_s(device, allocate)}


def _uploading(device: Device) -> Iterator[Message]:
    source = torch.ones(ON_HOST.copied_bytes, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device.torch_device)
    yield {"value": source.numel() / _best_s(device, lambda: target.copy_(source, non_blocking=True))}
