"""Importing a study starts no threads, so that its probes can be forked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "studies"
COUNT_NEW_THREADS = """
import os, runpy, sys
import torch
before = len(os.listdir("/proc/self/task"))
runpy.run_path(sys.argv[1])
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize("name", ["digits", "gpt", "tagger"])
def test_importing_a_study_starts_no_threads(name: str) -> None:
    # NumPy's and SciPy's BLAS start theirs when they are loaded, unless told not to.
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COUNT_NEW_THREADS, str(STUDIES / name / "model.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0"
