"""How many kernels oneDNN makes: it makes some for each new shape of a tensor, and keeps the latest."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import IO

from torch.backends import mkldnn

CAPACITY = 1024
VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
MISS = b"create:cache_miss"  # in the line that oneDNN prints of a kernel that it had not kept


def cache_capacity() -> int | None:
    """How many kernels oneDNN keeps. A further one replaces the one that was not used for longest. None where that is not clear.

    Source: https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html
    """
    said = next((os.environ[name] for name in VARIABLES if name in os.environ), str(CAPACITY))
    return int(said) if said.isdecimal() else None


def num_kernels_made(run: Callable[[], None]) -> int:
    """How many kernels `run` lets oneDNN make; 0 in a torch without oneDNN.

    oneDNN tells it on standard output, in whose place there is a file meanwhile. What else was printed goes to standard output then.
    """
    if not mkldnn.is_available():
        return 0
    with tempfile.TemporaryFile() as printed:
        try:
            with _stdout_in(printed), mkldnn.verbose(mkldnn.VERBOSE_ON_CREATION):
                run()
        finally:
            printed.seek(0)
            lines = printed.readlines()
            for line in lines:
                if not line.startswith((b"onednn_verbose", b"dnnl_verbose")):
                    os.write(1, line)
    return sum(MISS in line for line in lines)


@contextlib.contextmanager
def _stdout_in(file: IO[bytes]) -> Iterator[None]:
    """A context in which the file takes what this process prints, by Python or by C."""
    _flush()
    stdout = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        try:
            _flush()
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)


def _flush() -> None:
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
