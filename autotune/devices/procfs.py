"""Memory of this process and of its children as Linux accounts for it, in bytes.

The meaning of the figures, measured over training runs (transformer, convolutions, LSTM; 0.5 to 5 GiB):

- `VmData` is what `RLIMIT_DATA` bounds: private writable memory, touched or not. The kernel keeps no peak of it.
- `VmPeak - (VmSize - VmData)` is its peak as long as the other mappings (code, read-only files, shared memory) stay:
  in every run it agreed to the MiB with sampling every 3 ms. The kernel keeps `VmPeak` itself, so no short peak is missed.
- `VmHWM - RssFile - RssShmem` is the peak of the touched part, 90 to 230 MiB below (thread stacks, tails of buffers).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """A process's memory in bytes; see the module's text."""

    data_bytes: int  # VmData
    touched_bytes: int  # RssAnon and what of it was swapped out
    peak_touched_bytes: int
    shared_bytes: int  # RssShmem, e.g. batches that data-loading workers handed over
    peak_size_data_bytes: int  # VmPeak - (VmSize - VmData)

    def peak_data_bytes(self, limit_bytes: int | None = None) -> int:
        """Peak of `VmData`.

        A large mapping of something else (a file, say) that is gone by now also raised `VmPeak`. The figure then exceeds the
        limit, or twice what was ever touched; in that case the touched peak plus what is untouched now replaces it.
        """
        untouched = max(0, self.data_bytes - self.touched_bytes)
        believable = 2 * self.peak_touched_bytes + untouched
        if limit_bytes is not None:
            believable = min(believable, limit_bytes)
        peak = self.peak_size_data_bytes
        if peak > believable:
            peak = min(believable, self.peak_touched_bytes + untouched)
        return max(peak, self.data_bytes)


def process_memory(proc: Path = PROC) -> ProcessMemory:
    """This process's memory now; where there is no /proc, what it has touched stands for all of it."""
    if not proc.exists():
        touched = psutil.Process().memory_info().rss
        return ProcessMemory(
            data_bytes=touched,
            touched_bytes=touched,
            peak_touched_bytes=touched,
            shared_bytes=0,
            peak_size_data_bytes=touched,
        )
    status = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (
            line.partition(":") for line in (proc / "self/status").read_text(encoding="utf-8").splitlines()
        )
        if name.startswith(("Vm", "Rss"))
    }
    touched = status["RssAnon"] + status.get("VmSwap", 0)
    peak_touched = status["VmHWM"] - status["RssFile"] - status["RssShmem"] + status.get("VmSwap", 0)
    return ProcessMemory(
        data_bytes=status["VmData"],
        touched_bytes=touched,
        peak_touched_bytes=max(peak_touched, touched),
        shared_bytes=status["RssShmem"],
        peak_size_data_bytes=status["VmPeak"] - (status["VmSize"] - status["VmData"]),
    )


def descendants(proc: Path = PROC) -> Iterator[int]:
    """Process ids of this process's living children, their children, and so on.

    `psutil.Process.children` reads every process of the machine, which takes 14 us each. On a large server that is too slow
    between the timed blocks of a probe.
    """
    unseen = [os.getpid()]
    while unseen:
        for task in (proc / str(unseen.pop()) / "task").glob("*/children"):
            try:
                children = [int(pid) for pid in task.read_text(encoding="utf-8").split()]
            except OSError:  # ended meanwhile
                continue
            yield from children
            unseen += children


def descendants_private_bytes() -> int:
    """Memory that belongs to descendants alone. Pages that they share with this process are not counted again."""
    total = 0
    for pid in descendants():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or belongs to another user
            total += psutil.Process(pid).memory_full_info().uss
    return total
