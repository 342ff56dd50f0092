"""Starts a supervisor's process (`autotune.runners.supervisor`), also ahead of the runner that will use it.

It imports nothing of the package, so that the command line can start one before it imports what searches: both import for seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLAS_THREADS = "OPENBLAS_NUM_THREADS"


@dataclass(frozen=True, kw_only=True)
class Started:
    """A supervisor that imports what every job needs, or has done so, and waits for its greeting.

    Attributes:
        process: its own; it leads a session.
        socket: to it.
        folder: descriptor of a pipe, for the name of the search's folder: where the search dies, what is left of it is removed.
        printed: descriptor of a file that holds what it prints until the greeting names a log.
        environment: its variables.
    """

    process: subprocess.Popen[bytes]
    socket: socket.socket
    folder: int
    printed: int
    environment: dict[str, str]

    def end(self) -> None:
        """End one that has not been greeted."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.socket.close()
        os.close(self.folder)
        os.close(self.printed)


def quiet(environment: dict[str, str]) -> dict[str, str]:
    """The same variables, by which numpy's BLAS starts no threads in the process that forks."""
    return {BLAS_THREADS: "1"} | environment


def start(environment: dict[str, str], *, imports: bool, processors: frozenset[int] | None = None) -> Started:
    """Start a supervisor.

    Args:
        environment: its variables.
        imports: whether it imports torch and what jobs need of the package at once.
        processors: numbers of those that everything behind it runs on; None for all that this process may use.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        own, its = socket.socketpair()
        ours.callback(own.close)
        theirs.callback(its.close)
        folder, to_folder = os.pipe()
        ours.callback(os.close, to_folder)
        theirs.callback(os.close, folder)
        os.set_blocking(folder, False)
        with tempfile.TemporaryFile() as file:  # Pythons built for an old glibc lack `os.memfd_create`
            printed = os.dup(file.fileno())
        ours.callback(os.close, printed)
        told = {
            "socket": its.fileno(),
            "folder": folder,
            "parent": os.getpid(),
            "processors": None if processors is None else sorted(processors),
            "imports": imports,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune.runners.supervisor", json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            pass_fds=[its.fileno(), folder],
            env=environment,
            start_new_session=True,
        )
        ours.pop_all()  # else they are closed, too: something failed
    return Started(process=process, socket=own, folder=to_folder, printed=printed, environment=environment)


_ahead: list[Started] = []


@contextlib.contextmanager
def started_ahead() -> Iterator[None]:
    """Let a supervisor start while this process imports; `take` hands it out. Where nobody asks inside the block, it ends."""
    _ahead.append(start(quiet(dict(os.environ)), imports=True))
    try:
        yield
    finally:
        while _ahead:
            _ahead.pop().end()


def take(environment: dict[str, str], *, imports: bool, processors: frozenset[int] | None) -> Started:
    """A supervisor as `start` makes it. The first caller gets the one that was started ahead, or ends it, where it needs another one."""
    with contextlib.suppress(IndexError):  # none waits; slots ask for theirs in threads
        ahead = _ahead.pop()
        if imports and processors is None and ahead.environment == environment and ahead.process.poll() is None:
            return ahead
        ahead.end()
    return start(environment, imports=imports, processors=processors)


def held_ahead_bytes() -> int:
    """Memory that the supervisor started ahead has for itself. For a probe it is free: the probe is forked from it, or it has ended."""
    if not _ahead:
        return 0
    with contextlib.suppress(OSError):  # it has ended
        found = re.search(
            r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{_ahead[0].process.pid}/status").read_text(), re.MULTILINE
        )
        return int(found[1]) * 1024 if found else 0
    return 0
