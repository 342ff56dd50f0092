"""The C heap keeps what is freed, so that no step has to take its memory from the system page by page."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch, UnsupportedError
from autotune.techniques.frameworks import At, Lines, Unsaid, words
from autotune.units import MIB

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NEVER = -1  # the heap's end is never given back
_USUAL_MMAPS = 65536
_LARGEST_THRESHOLD = 32 * MIB  # at which glibc's own, which follows what is freed, ends
_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)
_MALLOPT = '__import__("ctypes").CDLL(None).mallopt'
_is_kept = [False]  # malloc does not tell its settings


class KeepHeap(Switch):
    """glibc's `malloc` neither gives the heap's free end back nor maps large blocks one by one, for the whole process.

    A step frees its activations, and the next one takes as many again. Each page of what was given back meanwhile costs a page fault,
    in which the kernel clears it. On one processor a long short-term memory network took 0.6 times as long without these faults
    in fp32, with 5 % more memory, and 0.5 times in bf16 at a larger batch, with 26 % more. Whether the heap is trimmed turns on
    what lies at its end, so without this, processes of one config, and steps of one process, are unlike.

    Source: mallopt(3).
    """

    name = "keep_heap"
    summary = "freed memory stays with the process instead of going back to the system in each step: faster, may take more memory"
    applies = "CPUs, with glibc's `malloc`"
    phase = Phase.PROCESS
    order = 40
    # Large activations gain most. Holes that large blocks leave in the heap are new, since each had a mapping of its own.
    expected = Expectation(
        compute=Factor(typical=0.85, spread=1.3),
        activations=Factor(typical=1.1, spread=1.15),
        untraced=Factor(spread=1.5),
    )
    keeps_random_masks = True
    likely = (True,)
    frameworks = words(
        loop=Unsaid(),
        torch=Lines(
            {
                At.PROCESS: f"{_MALLOPT}({_M_TRIM_THRESHOLD}, {_NEVER})  # M_TRIM_THRESHOLD: freed memory stays\n"
                f"{_MALLOPT}({_M_MMAP_MAX}, 0)  # M_MMAP_MAX: large blocks, too"
            }
        ),
    )

    def why_not(self, setting: Setting) -> str:
        if setting.device.capabilities.own_memory:
            return "the device has memory of its own"
        if not hasattr(ctypes.CDLL(None), "mallopt") or "malloc" in os.environ.get("LD_PRELOAD", ""):
            return "the process does not use glibc's malloc"
        said = next((name for name in _VARIABLES if name in os.environ), "")
        return f"the environment sets the heap itself ({said})" if said else ""

    def apply(self, build: Build, choice: Choice) -> None:
        """Keep whatever is freed from now on."""
        if not (_set(_M_TRIM_THRESHOLD, _NEVER) and _set(_M_MMAP_MAX, 0)):
            raise UnsupportedError("keep_heap: this process's malloc has no such settings")
        _is_kept[0] = True

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give memory back again. glibc's own threshold does not move any more: it stays where it usually ends."""
        was_kept = _is_kept[0]
        try:
            yield
        finally:
            if _is_kept[0] and not was_kept:
                _is_kept[0] = False
                _set(_M_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
                _set(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
                _set(_M_MMAP_MAX, _USUAL_MMAPS)


def _set(parameter: int, value: int) -> bool:
    """Set one of malloc's parameters. Returns whether it was taken."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1
