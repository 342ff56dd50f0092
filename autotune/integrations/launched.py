"""A search in a script that a launcher started in several processes: rank 0 searches, the others lend their devices and wait.

They wait on the host, by looking into the store through which the processes found each other. In a collective they would hold the device
that a probe needs, and be ended by its time-out.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import pickle
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import distributed

from autotune.devices import capabilities_of, open_device
from autotune.devices.cpu import THREAD_VARIABLES
from autotune.errors import AutotuneError, TaskError, in_one_line
from autotune.group import WAIT_S, launched_device
from autotune.records.config import World
from autotune.records.result import Result
from autotune.units import format_seconds

_LOOK_EVERY_S = 0.1
_LAST_WORDS_S = 5.0  # until the others have heard how it ended, of whom some may be gone
_OF_LAUNCHERS = {
    "ACCELERATE_USE_FSDP", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "NODE_RANK", "RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE",
}  # fmt: skip
_FAMILIES = ("TORCHELASTIC_", "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")  # of launchers' variables
_number = itertools.count()  # of this process's searches, which all processes make in the same order


def search_by_first(search: Callable[[str], Result], device: str, world: World) -> Result:
    """What the search of rank 0 finds, in all processes of the launched world.

    Args:
        search: is called in rank 0 alone, with the devices of all, as the option `devices` takes them.
        device: on which this process trains, as `launched_device` takes it.

    Raises:
        TaskError: they run on several machines, or share a GPU, or one of them does not come.
        AutotuneError: as the search does, and in the other processes with the same sentence.
    """
    store = distributed.PrefixStore(f"autotune/{next(_number)}", _store(world))  # type: ignore[attr-defined]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    name = open_device(launched_device(device, world)).name
    store.set(str(world.rank), json.dumps([platform.node(), name]))
    if world.rank:
        found = pickle.loads(_wait_for(store, "answer"))
        store.add("heard", 1)
        if isinstance(found, AutotuneError):
            raise found
        return found  # type: ignore[no-any-return]
    try:
        places = [json.loads(_wait_for(store, str(rank), WAIT_S)) for rank in range(world.size)]
        with _as_if_alone(world.size):
            result = search(devices_of(places))
    except BaseException as error:
        known = isinstance(error, AutotuneError)
        _tell(store, error if known else AutotuneError(f"the search in rank 0 ended by {in_one_line(error)}"), world)
        raise
    _tell(store, result, world)
    return result


def _store(world: World) -> Any:
    """Through which the processes found each other, or else will."""
    return distributed.distributed_c10d._get_default_store() if distributed.is_initialized() else _store_to_be(world)


@functools.cache  # rank 0 may be its server, which `init_process_group` then uses
def _store_to_be(world: World) -> Any:
    """The store at the address that the launcher has set, where there is no process group yet."""
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", world.rank, world.size))[0]


def _wait_for(store: Any, key: str, wait_s: float = math.inf) -> bytes:
    """The value of a key once it is there: whoever launched the processes ends them all when one of them ends.

    Raises:
        TaskError: it is not there in time.
    """
    ends = time.monotonic() + wait_s
    while not store.check([key]):
        time.sleep(_LOOK_EVERY_S)  # a wait of the store's own would let no signal through
        if time.monotonic() > ends:
            raise TaskError(
                f"rank {key} has not come to the search within {format_seconds(wait_s)}; let every process of the script call it, not "
                "the first alone"
            )
    return store.get(key)  # type: ignore[no-any-return]


def _tell(store: Any, found: Result | BaseException, world: World) -> None:
    """Tell the others what was found, and let them hear it: they are ended when this process ends by an error."""
    store.set("answer", pickle.dumps(found))
    ends = time.monotonic() + _LAST_WORDS_S
    while store.add("heard", 0) < world.size - 1 and time.monotonic() < ends:
        time.sleep(_LOOK_EVERY_S)


def devices_of(places: Sequence[tuple[str, str]]) -> str:
    """The devices of processes, each given by its machine and its device's name, as the option `devices` takes them."""
    machines = dict.fromkeys(machine for machine, _ in places)
    if len(machines) > 1:
        raise TaskError(
            f"the processes run on {len(machines)} machines ({', '.join(machines)}), and a search is of the devices of one; "
            "launch the script on one of them first, and give the answer to the script on all"
        )
    names = [name for _, name in places]
    kind = names[0].partition(":")[0]
    if not capabilities_of(kind).own_processors:
        return f"{kind}:{len(names)}"
    if shared := next((name for name in names if names.count(name) > 1), None):
        ranks = " and ".join(str(rank) for rank, name in enumerate(names) if name == shared)
        raise TaskError(
            f"ranks {ranks} train on {shared}, as each of them sees it; start as many processes as there are GPUs, let every process "
            "see all of them, and take its own by LOCAL_RANK"
        )
    return f"{kind}:{','.join(name.partition(':')[2] for name in names)}"


@contextmanager
def _as_if_alone(size: int) -> Iterator[None]:
    """The environment of a process that nobody launched, with the threads of all: each probe's world is its own, and its processes
    share them out.
    """
    own_threads = torch.get_num_threads()
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name in _OF_LAUNCHERS or name.startswith(_FAMILIES)]:
            del os.environ[name]
        os.environ |= dict.fromkeys(THREAD_VARIABLES, str(size * own_threads))
        torch.set_num_threads(size * own_threads)
        try:
            yield
        finally:
            torch.set_num_threads(own_threads)
