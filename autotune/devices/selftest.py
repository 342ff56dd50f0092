"""Tests of a device for `autotune doctor`, each in a separate process. Each function returns plain facts and judges nothing."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from typing import Any

from autotune.devices import nvml, open_device
from autotune.devices.cuda import CudaDevice
from autotune.devices.torch_errors import attempted_bytes
from autotune.errors import in_one_line
from autotune.lazy import torch
from autotune.units import GIB, MIB

Facts = dict[str, Any]


def memory_limit(name: str) -> Facts:
    """Fill the device block by block until it fails under a limit."""
    device = open_device(name)
    device.enter()
    gpu = device.capabilities.own_memory
    start_bytes, block_bytes = device.outside_bytes(), (64 if gpu else 8) * MIB
    limit_bytes = start_bytes + (2 * GIB if gpu else 256 * MIB)
    device.limit_memory(limit_bytes)
    blocks: list[Any] = []
    facts: Facts = {"limit_bytes": limit_bytes, "start_bytes": start_bytes, "block_bytes": block_bytes, "error": ""}
    try:
        while len(blocks) * block_bytes < 2 * (limit_bytes - start_bytes):
            blocks.append(torch.ones(block_bytes, dtype=torch.uint8, device=device.torch_device))
    except Exception as error:
        held_bytes = device.held_bytes(attempted_bytes(error))
        facts |= {"error": in_one_line(error), "recognised": device.is_out_of_memory(error), "held_bytes": held_bytes}
        facts |= {"attempted_bytes": attempted_bytes(error), "crowded": device.is_crowded(attempted_bytes(error))}
    return {**facts, "allocated_bytes": len(blocks) * block_bytes, "peak_bytes": device.peak_bytes()}


def other_error(name: str) -> Facts:
    """Raise an error that is no lack of memory: shapes that do not match."""
    device = open_device(name)
    device.enter()
    try:
        torch.ones(3, 4, device=device.torch_device) @ torch.ones(5, 6, device=device.torch_device)
    except RuntimeError as error:
        return {"error": in_one_line(error), "recognised": device.is_out_of_memory(error)}
    return {"error": "", "recognised": False}


def books(name: str) -> Facts:
    """Hold a known amount of memory, and read the device's peak and what the driver or the kernel books."""
    device = open_device(name)
    device.enter()
    held_bytes = 256 * MIB
    device.outside_bytes()  # compute threads, which the block would start, are started here
    # a card's peak has what lay outside torch's allocator; a process's has what threads that start map for a moment
    before_bytes = device.peak_bytes() if device.capabilities.own_memory else device.current_bytes()
    block = torch.ones(held_bytes, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    facts: Facts = {"allocated_bytes": held_bytes, "grown_bytes": device.peak_bytes() - before_bytes}
    facts |= {"peak_bytes": device.peak_bytes(), "detail": device.memory_detail()}
    del block
    facts["kept_bytes"] = device.peak_bytes() - before_bytes
    if isinstance(device, CudaDevice):
        booked_bytes, shared = device.booked_bytes()
        facts |= {"booked_bytes": booked_bytes, "others_listed": shared}
        facts["statistics"] = {key: value for key, value in torch.cuda.memory_stats().items() if ".all." in key}
    return facts


def hold(name: str) -> Facts:
    """Hold memory until `autotune doctor` kills this process."""
    device = open_device(name)
    device.enter()
    block = torch.ones(GIB // 2, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    return {"held_bytes": block.numel(), "keep": block}


def clock(name: str) -> Facts:
    """Time the same work by the wall clock and by the GPU's own events."""
    device = open_device(name)
    device.enter()
    matrix = torch.ones(2048, 2048, device=device.torch_device)
    for _ in range(3):
        matrix @ matrix
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    timed = []
    for _ in range(3):  # other processes may hold the processor
        device.synchronize()
        started = time.perf_counter()
        begin.record()
        for _ in range(50):
            matrix @ matrix
        end.record()
        device.synchronize()
        timed.append((time.perf_counter() - started, begin.elapsed_time(end) / 1000))
    wall_s, device_s = min(timed, key=lambda pair: pair[0] - pair[1])
    return {"wall_s": wall_s, "device_s": device_s}


def page_locked(name: str) -> Facts:
    """Copy a batch to the GPU from pageable and from page-locked memory."""
    device = open_device(name)
    device.enter()
    facts: Facts = {}
    for kind in ("pageable", "pinned"):
        source = torch.ones(64 * MIB, dtype=torch.uint8)
        source = source.pin_memory() if kind == "pinned" else source
        source.to(device.torch_device)
        device.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            source.to(device.torch_device, non_blocking=True)
        device.synchronize()
        facts[f"{kind}_bytes_per_s"] = 4 * source.numel() / (time.perf_counter() - started)
    return facts


def workers(name: str) -> Facts:
    """Load a few batches in two processes."""
    warnings.simplefilter("ignore")  # torch warns that two workers are many for a machine with one processor
    samples = torch.arange(64.0)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(samples), batch_size=8, num_workers=2, multiprocessing_context="fork"
    )
    return {"sum": float(sum(batch.sum() for (batch,) in loader)), "expected": float(samples.sum())}


def driver(name: str) -> Facts:
    """NVML's raw readings, without anything that names a person, a process or a board."""
    connection = nvml.connect()
    if isinstance(connection, str):
        return {"why_none": connection}
    return {
        "driver": connection.driver(),
        "boards": [
            {
                "name": gpu.name,
                "mig": gpu.is_mig,
                "capability": connection.capability(gpu),
                "used_and_total_bytes": connection.memory(gpu),
                "num_processes": len(connection.used_by_process(gpu)),
                "telemetry": {**asdict(connection.telemetry(gpu)), "processes": None},
            }
            for gpu in connection.visible_gpus()
        ],
    }


TESTS = {
    function.__name__: function
    for function in (memory_limit, other_error, books, hold, clock, page_locked, workers, driver)
}
