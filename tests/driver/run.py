"""Where the built driver lies, and a state file for a test or a command."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.driver.build import BuildError, build


def libraries() -> dict[str, str]:
    """The variables with which a process loads the driver for this Python's torch, which is not imported.

    Raises:
        BuildError: there is no torch, it is not built for CUDA 13, or a program that building needs is missing.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError(f"{sys.executable} has no torch: install its CUDA build")
    folder = str(build(Path(found.origin).parent, Path(sys.prefix, "driver")))
    others = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{folder}:{others}" if others else folder, "TRITON_LIBCUDA_PATH": folder}


@contextlib.contextmanager
def played_state() -> Iterator[Path]:
    """The state file that PLAYED_STATE names, or else a fresh one, deleted in the end with what ranks left beside it."""
    if given := os.environ.get("PLAYED_STATE"):
        yield Path(given)
        return
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="played.", dir=shared_memory if shared_memory.is_dir() else None) as folder:
        yield Path(folder, "books")
