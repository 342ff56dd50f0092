"""The process group of the processes that train one model together: who they are, joining it, and sums over them."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import platform
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from autotune.devices import Device, capabilities_of, open_device
from autotune.errors import ConfigError, DeviceError
from autotune.records.config import ALONE, World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WAIT_S = 600.0  # for a peer, as torch waits by default for NCCL
_LAST_FREES_S = 0.05
# what processes need to find each other, beside how many they are
_FINDING = {
    "RANK": "which of them this one is, from 0 on",
    "MASTER_ADDR": "the machine of rank 0, localhost where there is one machine",
    "MASTER_PORT": "a free port there",
}
_numbers = itertools.count()  # of this process's meetings, which all processes of a world have in the same order


def launched_world() -> World:
    """The world that this process was launched into, by `torchrun` or whatever sets torch's variables; else it is alone.

    Raises:
        ConfigError: the variables say that there are several processes, and not how they find each other.
    """
    if distributed.is_available() and distributed.is_initialized():
        return World(size=distributed.get_world_size(), rank=distributed.get_rank())
    size = int(os.environ.get("WORLD_SIZE") or 1)
    if size > 1 and (missing := [f"{name} ({what})" for name, what in _FINDING.items() if name not in os.environ]):
        raise ConfigError(
            f"WORLD_SIZE={size} says that several processes train, and the environment lacks {' and '.join(missing)}; launch the "
            "script with torchrun, which sets them, or set them in every process, or unset WORLD_SIZE to train in this one alone"
        )
    return ALONE if size == 1 else World(size=size, rank=int(os.environ["RANK"]))


def launched_device(device: str, world: World) -> str:
    """The device that a launched process trains on: the one that the user names, in a world of one.

    Args:
        device: as the user names it. A GPU without a number is the one of the process's number on its machine, among those that
            it sees.
    """
    if world.size == 1 or ":" in device or not (opened := open_device(device)).capabilities.own_processors:
        return device
    number = int(os.environ.get("LOCAL_RANK", world.rank)) % torch.cuda.device_count()
    return f"{opened.kind}:{number}"


def require_groups(world: World) -> None:
    """Raise ConfigError where the installed torch knows no groups of processes (`USE_DISTRIBUTED=0`)."""
    if not distributed.is_available():
        raise ConfigError(
            f"a world of {world.size} processes was asked for, and the installed torch {torch.__version__} was built without "
            "torch.distributed; train in one process, or install another build"
        )


def shard_types() -> tuple[type[DTensor], ...]:
    """Types of tensors of which each process holds a part; none where the installed torch knows no groups of processes."""
    if not distributed.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return (DTensor,)


def join(world: World, device: torch.device, meeting: Path | str = "", wait_s: float = WAIT_S) -> None:
    """Make this process one of its world's group, unless it is already.

    Args:
        meeting: how the processes find each other: through a file, where all are on this machine, or at `HOST:PORT`, where rank 0
            listens; empty for what the environment says.

    Raises:
        ConfigError: the group that is there has another size, or torch knows no groups.
    """
    require_groups(world)
    _end_after_the_threads()
    if distributed.is_initialized():
        if (size := distributed.get_world_size()) != world.size:
            raise ConfigError(
                f"a world of {world.size} processes was asked for, and torch's process group has {size}; start {world.size} processes, or "
                f"pass World(size={size})"
            )
        return
    if isinstance(meeting, Path):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        capabilities_of(device.type).collectives,
        store=_open_store(meeting, world, timedelta(seconds=wait_s)) if meeting else None,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=wait_s),
    )


@functools.cache
def _end_after_the_threads() -> None:
    """Let Gloo's threads run once more before the interpreter ends.

    They free the tensors of a collective after it is done, and need the interpreter's lock for it. A thread that waits for the lock
    when the interpreter ends aborts the process: https://github.com/pytorch/pytorch/pull/179291.
    """
    atexit.register(time.sleep, _LAST_FREES_S)


def _open_store(meeting: Path | str, world: World, wait: timedelta) -> Any:
    """What the processes of a world tell each other through before they are a group."""
    if isinstance(meeting, Path):
        return distributed.FileStore(str(meeting), world.size)  # type: ignore[attr-defined]
    host, _, port = meeting.rpartition(":")
    return distributed.TCPStore(host, int(port), world.size, is_master=world.rank == 0, timeout=wait)  # type: ignore[attr-defined]


def require_own_device(world: World, device: Device) -> None:
    """Raise where processes of a launched world have taken the same GPU: NCCL would refuse it later, or hang.

    They tell each other through the store by which they found each other, before the first collective.

    Raises:
        DeviceError: in all of them. It names the processes and the GPU.
    """
    store: Any = distributed.PrefixStore(  # type: ignore[attr-defined]
        f"autotune/devices/{next(_numbers)}", distributed.distributed_c10d._get_default_store()
    )
    store.set(str(world.rank), json.dumps([platform.node(), device.hardware_id(), device.name]))
    found = [json.loads(store.get(str(rank))) for rank in range(world.size)]
    by_place: dict[tuple[str, str], list[int]] = {}
    for rank, (machine, hardware_id, _) in enumerate(found):
        by_place.setdefault((machine, hardware_id), []).append(rank)
    for (machine, hardware_id), ranks in by_place.items():
        if hardware_id and len(ranks) > 1:
            raise DeviceError(
                f"ranks {' and '.join(map(str, ranks))} have taken one GPU, {found[ranks[0]][2]} of {machine} ({hardware_id}), and each "
                "needs its own; start as many processes as there are GPUs, and name no device, so that each takes the one of its "
                "LOCAL_RANK"
            )


def num_collectives() -> int:
    """How many collectives this process has begun, over all its groups; -1 before it is one of a group."""
    if not distributed.is_initialized():
        return -1
    groups: list[Any] = [*distributed.distributed_c10d._world.pg_map]
    return sum(group._get_sequence_number_for_group() for group in groups)


def host_or(device: torch.device) -> torch.device:
    """Where what is decided together is put together: on the host, where the group can, else on the device that it is for."""
    return torch.device("cpu") if "gloo" in distributed.get_backend_config() else device


class Together:
    """What the processes of a world must decide alike: each takes the largest of what they found, so all go on, or all stop."""

    def __init__(self, world: World, device: torch.device) -> None:
        self._size, self._device = world.size, device

    def largest(self, value: float) -> float:
        """The largest of the processes' values; they wait for each other."""
        return self.extremes(value)[1]

    def extremes(self, value: float) -> tuple[float, float]:
        """The smallest and the largest of the processes' values; they wait for each other."""
        return (value, value) if self._size == 1 else extremes(value, self._device)

    def agree(self, value: float) -> bool:
        """Whether all processes have the same value."""
        return self._size == 1 or agree(value, self._device)


def extremes(value: float, device: torch.device) -> tuple[float, float]:
    """The smallest and the largest of the values of all processes of the group; they wait for each other."""
    values = torch.tensor([-value, value], dtype=torch.float64, device=host_or(device))
    distributed.all_reduce(values, distributed.ReduceOp.MAX)
    negative, largest = values.tolist()
    return -negative, largest


def agree(value: float, device: torch.device) -> bool:
    """Whether all processes of the group have the same value; they wait for each other."""
    smallest, largest = extremes(value, device)
    return smallest == largest


def gather(value: Any) -> list[Any]:
    """The values of all processes of the group, in their order; they travel pickled."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def take_from_first(value: Any = None) -> Any:
    """The value of the first process of the group, which the others wait for; theirs are ignored. It travels pickled."""
    found = [value]
    distributed.broadcast_object_list(found, 0)
    return found[0]


def deal(values: Sequence[Any] | None = None) -> Any:
    """This process's one of the values that the first process has, one for each of the group; they travel pickled."""
    found: list[Any] = [None]
    distributed.scatter_object_list(found, values, 0)  # type: ignore[arg-type]
    return found[0]


def sum_over(values: torch.Tensor) -> torch.Tensor:
    """The sum of tensors of one shape over the processes of the group, on their device."""
    distributed.all_reduce(values)
    return values
