"""What devices that train together find out about each other for `autotune doctor`: one process a device, all in one group."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from autotune.devices import open_device
from autotune.devices.selftest import Facts
from autotune.group import join
from autotune.lazy import torch
from autotune.records.config import World
from autotune.units import KIB, MIB

SIZES = (64 * KIB, 4 * MIB, 64 * MIB)  # bytes: a small layer's gradients, a block's, a large bucket's
NUM_TIMED = 5  # of each size


def collectives(name: str, world: World, store: str, wait_s: float) -> Facts:
    """Join the others, and time what training sends over the wire.

    Returns:
        `sum` and `expected` of the ranks' numbers; `outside_bytes`, by which collectives let the process's memory grow that no
        tensor holds: the first one, or where the device tells them apart all of them; `bytes` of each size, and `seconds` for each
        collective and size.
    """
    from torch import distributed

    warnings.simplefilter("ignore")  # newer torch has other names for two of the collectives
    device = open_device(name)
    device.enter()
    torch.set_num_threads(max(1, torch.get_num_threads() // world.size))
    number = torch.full((1,), float(world.rank + 1), device=device.torch_device)
    device.synchronize()
    before_bytes = device.outside_bytes()
    with device.count_communicators(1):
        join(world, device.torch_device, Path(store), wait_s)
        distributed.all_reduce(number)
    device.synchronize()
    facts: Facts = {"sum": float(number), "expected": world.size * (world.size + 1) / 2}
    facts["outside_bytes"] = device.outside_bytes() - before_bytes

    nothing = torch.zeros(1, device=device.torch_device)

    def seconds(run: Callable[..., Any], *tensors: Any) -> float:
        timed = []
        for _ in range(1 + NUM_TIMED):
            distributed.all_reduce(nothing)
            device.synchronize()
            started = time.perf_counter()
            run(*tensors)
            device.synchronize()
            timed.append(time.perf_counter() - started)
        return median(timed[1:])

    runs: dict[str, list[float]] = {name: [] for name in ("all-reduce", "all-gather", "reduce-scatter")}
    for num_bytes in SIZES:
        part = torch.zeros(num_bytes // 4 // world.size, device=device.torch_device)
        whole = torch.zeros(len(part) * world.size, device=device.torch_device)
        runs["all-reduce"].append(seconds(distributed.all_reduce, whole))
        runs["all-gather"].append(seconds(distributed.all_gather_into_tensor, whole, part))
        runs["reduce-scatter"].append(seconds(distributed.reduce_scatter_tensor, part, whole))
    if device.capabilities.communicator_bytes:  # NCCL makes a path's buffers when the first collective takes it
        facts["outside_bytes"] = device.outside_bytes() - before_bytes
    distributed.destroy_process_group()
    return {**facts, "bytes": SIZES, "seconds": runs}
