"""Runs model files, each in a process of its own that is forked from one with torch, and finds those that start threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_COUNT = """
import os, runpy, sys
import torch
for path in sys.argv[1:]:
    if not os.fork():
        before = len(os.listdir("/proc/self/task"))
        runpy.run_path(path)
        os._exit(len(os.listdir("/proc/self/task")) - before)
    assert os.wait()[1] == 0, path
"""


def count_new_threads(files: Iterable[Path]) -> subprocess.CompletedProcess[str]:
    """Ends with 0 where no file starts any; else its stderr names the first that does."""
    # NumPy's and SciPy's BLAS start theirs when they are loaded, unless told not to.
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _COUNT, *map(str, files)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
