"""Importing a study starts no threads, so that its probes can be forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STUDIES = Path(__file__).parents[2] / "studies"
COUNT_NEW_THREADS = """
import os, runpy, sys
import torch
for path in sys.argv[1:]:
    if not os.fork():
        before = len(os.listdir("/proc/self/task"))
        runpy.run_path(path)
        os._exit(len(os.listdir("/proc/self/task")) - before)
    assert os.wait()[1] == 0, path
"""


def test_importing_a_study_starts_no_threads() -> None:
    # NumPy's and SciPy's BLAS start theirs when they are loaded, unless told not to.
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COUNT_NEW_THREADS, *map(str, STUDIES.glob("*/model.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
