"""Tells when a process has ended that need not be a child of this one, also where the kernel has no call for that."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from pathlib import Path

_PIDFD_OPEN = 434  # on every architecture
_LOOK_S = 0.01  # between two looks at a process, where the kernel has no such call


def open_process(pid: int) -> int:
    """A descriptor of a process, which is readable once that has ended. The caller closes it.

    Linux has a call for it since 5.3. Where it has none, as the 4.18 of Red Hat 8, and where a container forbids it, a child of this
    process looks at the other one again and again, and holds a pipe open until that has ended.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        return _pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    return _look_at(pid)


def has_ended(process: int, timeout_s: float | None) -> bool:
    """Whether a process, given by its descriptor, ends in time."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _pidfd_open(pid: int) -> int:
    """Python has the call only where the headers that it was built with know it, which those of conda's 3.11 do not."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    os.set_inheritable(descriptor, False)
    return descriptor


def _look_at(pid: int) -> int:
    """A pipe that a child of this process closes once another process has ended. The child ends when nobody has the pipe any more."""
    if not _stat_of(pid).exists():
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    began = _began(pid)
    reader, writer = os.pipe()
    if began is None or os.fork():
        os.close(writer)
        return reader
    try:
        os.close(reader)
        poll = select.poll()
        poll.register(writer, 0)
        while not poll.poll(_LOOK_S * 1000) and _began(pid) == began:
            continue
    finally:
        os._exit(0)


def _began(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None where it has ended, even if nobody has waited for it."""
    try:
        state, *others = _stat_of(pid).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in ("Z", "X") else others[18]


def _stat_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/stat")
