"""Tells all processes that train one model when one of them has failed, so that each raises, with the reason.

The others would wait for it in a collective: until a time-out of minutes, unless whoever launched them ends them.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator
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
_LOST = (
    "and this one cannot go on without it; what it printed, or who launched it, may tell why; go on from a checkpoint"
)
_numbers = itertools.count()  # of the alarms of this process: all processes of a world make theirs in the same order


class Alarm:
    """Around what the processes of a world do together: where one raises, all do.

    A key of the group's store holds what happened. A thread of each process looks for it, and ends NCCL's communicators there, and
    with them a wait. Gloo cannot be ended so, and a group dropped by a thread may hang its process: there a wait ends with the
    process that failed.
    """

    def __init__(self, world: World, device: Device) -> None:
        self._world, self._device = world, device
        self._line = _Line(world, device.torch_device)
        self._line.start()
        weakref.finalize(self, self._line.end)  # at exit, too: the interpreter must not find it in the store

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Where the block raises, so do those of the others.

        Raises:
            PeerError: a process has failed, or is gone; it says which, and how, where that was told. A wait that NCCL's abort has
                ended returns as if nothing had happened, so this is asked before the block and after it.
            Exception: what the block raises, with a note where the others were told.
        """
        self._line.is_used = True
        try:
            self._require_silence()
            yield
            self._require_silence()
        except PeerError:
            raise
        except Exception as error:
            ran_out = self._device.is_out_of_memory(error)  # so may a communicator
            is_lost = tells_of_lost_peer(str(error))
            if ran_out or not (is_lost or isinstance(error, distributed.DistError)):
                self._tell(error, ran_out)
                raise
            self._line.heard.wait(TELL_S)  # it tells why before it ends, if it can
            if is_lost:
                self._line.hear(f"another process has ended without a word, {_LOST}")
            if self._line.heard.is_set():
                raise PeerError(self._line.text) from error
            raise
        finally:
            self._line.is_used = False

    def _require_silence(self) -> None:
        if self._line.heard.is_set():
            raise PeerError(self._line.text)

    def _tell(self, error: Exception, ran_out: bool) -> None:
        what, next_step = f"failed with {in_one_line(error)}", "what it printed tells more"
        if ran_out:
            attempted = attempted_bytes(error)
            why = f"an allocation of {format_bytes(attempted)} failed" if attempted else in_one_line(error)
            what, next_step = f"ran out of memory ({why})", _NEXT_STEP
            error.add_note(
                "autotune cannot go on in smaller micro batches: the other processes are somewhere in the same "
                f"step, and have been told to end; {_NEXT_STEP}"
            )
        self._line.say(f"rank {self._world.rank} {what}, and no other process can go on without it; {next_step}")


class _Line(threading.Thread):
    """Waits for the alarm, and gives it. It holds nothing of the session.

    It alone asks the store, which fails once the process that kept it is gone, and gives no answer for minutes once its file is.

    Attributes:
        heard: whether the alarm has been given, or the store is gone; then `text` says what happened.
        is_used: whether this process is in what all do together.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        super().__init__(daemon=True)
        self._world, self._device = world, device
        self._store: Any = distributed.distributed_c10d._get_default_store()
        self._key = f"autotune/failed/{next(_numbers)}"
        self._said = ""
        self._wakes, self._has_told, self._has_ended = threading.Event(), threading.Event(), False
        self.heard, self.text, self.is_used = threading.Event(), "", False

    def run(self) -> None:
        """Look for the alarm until there is one, and end what this process waits for."""
        try:
            while not self._has_ended and not self._look():
                self._wakes.wait(LOOK_EVERY_S)
        except RuntimeError:
            self.hear(f"the process that kept the group's store (rank 0, as a rule) is gone, {_LOST}")
            if self.is_used:  # else it may have ended well
                _abort_nccl(self._device)
        self._has_told.set()

    def _look(self) -> bool:
        if self._said:
            self._store.compare_set(self._key, "", self._said)
        if not self._store.check([self._key]):
            return False
        self.hear(self._store.get(self._key).decode())
        num_heard = f"{self._key}/heard"
        self._store.add(num_heard, 1)
        _abort_nccl(self._device)
        deadline = time.monotonic() + TELL_S
        while self._said and self._store.add(num_heard, 0) < self._world.size and time.monotonic() < deadline:
            time.sleep(0.01)
        return True

    def hear(self, text: str) -> None:
        """Take note of what happened, unless it is known."""
        self.text = self.text or text
        self.heard.set()

    def say(self, text: str) -> None:
        """Give the alarm, and wait until all have heard it, as long as they may take."""
        self._said = text
        self._wakes.set()
        self._has_told.wait(TELL_S)
        self.hear(text)

    def end(self) -> None:
        """Look no more."""
        self._has_ended = True
        self._wakes.set()
        if self is not threading.current_thread():
            self.join(TELL_S)


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
