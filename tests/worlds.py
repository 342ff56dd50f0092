"""A world of real processes for tests: they join one gloo group and run functions together."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PATIENCE_S = 60.0


class Ranks:
    """Processes that train together on the CPU, forked from this one; each function runs in all of them at once.

    Args:
        size: how many there are.
        kept_by_first: the first keeps the store through which they find each other; else it is a file.
    """

    def __init__(self, size: int = 2, *, kept_by_first: bool = False) -> None:
        self.size, self._kept_by_first = size, kept_by_first

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("fork")
        store = _free_port() if self._kept_by_first else Path(self._folder.name) / "group"
        pipes = [context.Pipe() for _ in range(self.size)]
        self._lines = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any, last: bool = False) -> list[Any]:
        """What `function(world, *arguments)` returns in each rank; None of one that died. The `last` one ends it, each rank when it is
        done.

        Raises:
            AssertionError: it raised, or did not end.
        """
        for line in self._lines:
            line.send((function, arguments, last))
        found = []
        for rank, line in enumerate(self._lines):
            assert line.poll(PATIENCE_S), f"rank {rank} did not end"
            try:
                failed, value = line.recv()
            except EOFError:
                failed, value = False, None
            assert not failed, value
            found.append(value)
        return found


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _serve(rank: int, size: int, store: Path | int, line: Connection) -> None:
    import torch

    from autotune.group import join
    from autotune.records.config import World

    torch.set_num_threads(1)
    world = World(size=size, rank=rank)
    if isinstance(store, int):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store), GLOO_SOCKET_IFNAME="lo")
    join(world, torch.device("cpu"), store if isinstance(store, Path) else None, PATIENCE_S)
    is_last = False
    while not is_last:
        function, arguments, is_last = line.recv()
        try:
            line.send((False, function(world, *arguments)))
        except BaseException:
            line.send((True, traceback.format_exc()))
