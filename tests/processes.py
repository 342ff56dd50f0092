"""What tests ask of processes that may end at any time."""

from __future__ import annotations

import contextlib

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, or could; a process that ends between two questions is not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def find_children(process: psutil.Process | None = None, *, recursive: bool = False) -> list[psutil.Process]:
    """The children of `process`, this one by default; none where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return (process or psutil.Process()).children(recursive=recursive)
    return []
