"""Whose a running trial is, and whether that controller still lives: on this machine its process is asked, elsewhere its beats."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import psutil

from autotune.devices.linux import PROC
from autotune.records.study import BegunTrial, Owner

BEAT_S = 30.0  # between two signs of life of a controller: a write costs 20 ms of a disk
# after the last sign of life a controller elsewhere counts as gone: 20 beats, since a write may wait for a busy database, and
# the clocks of two machines differ
GONE_AFTER_S = 600.0


def this_process() -> Owner:
    """This process as a controller."""
    namespace = ""  # a process's number means something within it alone: containers may share a name
    with contextlib.suppress(OSError):
        namespace = os.readlink(PROC / "self/ns/pid")
    return Owner(host=f"{socket.gethostname()} {namespace}".strip(), pid=os.getpid(), started=_started(os.getpid()))


def is_gone(trial: BegunTrial) -> bool:
    """Whether nobody runs a trial any more that was left running.

    A process runs one search of a study at a time. What it left running before, nobody runs. Nor does anybody where the study
    does not say whose a trial is: it is an older one, and this search has its lock.
    """
    owner, here = trial.owner, this_process()
    if owner is None or owner == here:
        return True
    if owner.host == here.host:
        return _started(owner.pid) != owner.started
    return time.time() - trial.seen_at_s > GONE_AFTER_S


def _started(pid: int) -> str:
    """When a process was started, as the kernel counts, whatever becomes of the clock; empty where it has ended."""
    try:
        if not PROC.exists():
            return str(psutil.Process(pid).create_time())
        stat = (PROC / f"{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, psutil.Error):
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    boot = ""
    with contextlib.suppress(OSError):
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return "" if state in "ZX" else f"{fields[18]} ticks after boot {boot}".strip()
