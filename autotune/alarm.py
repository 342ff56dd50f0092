"""Tells all processes that train one model when one of them has failed, so that each raises, with the reason.

The others would wait for it in a collective: until a time-out of minutes, unless whoever launched them ends them.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import distributed

from autotune.devices import Device
from autotune.devices.torch_errors import attempted_bytes
from autotune.errors import PeerError, in_one_line, tells_of_lost_peer
from autotune.records.config import World
from autotune.units import format_bytes

LOOK_EVERY_S = 0.2
TELL_S = 1.0  # for all to hear of a failure: then this process may end, and with it the store
_NEXT_STEP = "go on from a checkpoint, with a smaller batch_size or a config that needs less memory"
_numbers = itertools.count()  # of the alarms of this process: all processes of a world make theirs in the same order


class Alarm:
    """Around what the processes of a world do together: where one raises, all do.

    A key of the group's store holds what happened. A thread of each process looks for it, and ends NCCL's communicators there, and
    with them a wait. Gloo cannot be ended so, and a group dropped by a thread may hang its process: there a wait ends with the
    process that failed.
    """

    def __init__(self, world: World, device: Device) -> None:
        self._world, self._device = world, device
        self._store: Any = distributed.distributed_c10d._get_default_store()
        self._key = f"autotune/failed/{next(_numbers)}"
        self._heard: Future[str] = Future()  # what happened
        ended = threading.Event()
        thread = threading.Thread(
            target=_listen, args=(self._store, self._key, self._heard, ended, device.torch_device), daemon=True
        )
        thread.start()
        weakref.finalize(self, _end, ended, thread)  # at exit, too: the interpreter must not find it in the store

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Where the block raises, so do those of the others.

        Raises:
            PeerError: a process has failed; it says which, and how. A wait that NCCL's abort has ended returns as if nothing
                had happened, so this is asked before the block and after it.
            Exception: what the block raises, with a note where the others were told.
        """
        try:
            self._require_silence()
            yield
            self._require_silence()
        except PeerError:
            raise
        except Exception as error:
            ran_out = self._device.is_out_of_memory(error)  # so may a communicator
            is_own = ran_out or not (isinstance(error, distributed.DistError) or tells_of_lost_peer(str(error)))
            with suppress(RuntimeError):  # the store is gone with the process that kept it
                if is_own:
                    self._tell(error, ran_out)
                elif self._store.check([self._key]):
                    raise PeerError(self._store.get(self._key).decode()) from error
            raise

    def _require_silence(self) -> None:
        if self._heard.done():
            raise PeerError(self._heard.result())

    def _tell(self, error: Exception, ran_out: bool) -> None:
        what, next_step = f"failed with {in_one_line(error)}", "what it printed tells more"
        if ran_out:
            attempted = attempted_bytes(error)
            why = f"an allocation of {format_bytes(attempted)} failed" if attempted else in_one_line(error)
            what, next_step = f"ran out of memory ({why})", _NEXT_STEP
            error.add_note(
                "autotune cannot take the step again in smaller micro batches: the other processes are somewhere in the same "
                f"step, and have been told to end; {_NEXT_STEP}"
            )
        said = f"rank {self._world.rank} {what}, and no other process can go on without it; {next_step}"
        self._store.compare_set(self._key, "", said)
        deadline = time.monotonic() + TELL_S
        while self._store.add(_num_heard(self._key), 0) < self._world.size and time.monotonic() < deadline:
            time.sleep(0.01)


def _num_heard(key: str) -> str:
    return f"{key}/heard"


def _listen(store: Any, key: str, heard: Future[str], ended: threading.Event, device: torch.device) -> None:
    """Wait for the alarm, and end what this process waits for. It holds nothing of the session."""
    with suppress(RuntimeError):  # the store is gone with the process that kept it, which others will see
        while not ended.wait(LOOK_EVERY_S):
            if store.check([key]):
                heard.set_result(store.get(key).decode())
                store.add(_num_heard(key), 1)
                _abort_nccl(device)
                return


def _abort_nccl(device: torch.device) -> None:
    """End what waits on the device in any group, where NCCL does. A group for the host, too, keeps its gloo."""
    if not distributed.is_nccl_available():
        return
    found = []
    for group in [*distributed.distributed_c10d._world.pg_map]:
        with suppress(RuntimeError):  # it has no backend for the device
            found.append(group._get_backend(device))
    if backends := [backend for backend in found if isinstance(backend, distributed.ProcessGroupNCCL)]:
        backends[0]._group_start()  # one by one they could wait for each other
        for backend in backends:
            backend.abort()
        backends[0]._group_end()


def _end(ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()
    if thread is not threading.current_thread():
        thread.join(TELL_S)
