"""Tasks at a size, and what the commands say of them: for benchmarks that search and verify live, on one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Case:
    """A task at a size.

    Attributes:
        model: its file, from the root of the project.
        environment, arguments: what makes it that size.
    """

    name: str
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()


def ask(case: Case, command: str, *options: str, log: Path | None = None) -> dict[str, object]:
    """What a command about a task prints as JSON. What it tells beside is added to a log, if there is one."""
    done = subprocess.run(
        [sys.executable, "-m", "autotune", command, str(ROOT / case.model), *options, *case.arguments, "--json"],
        env={**os.environ, **case.environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if log is not None:
        with log.open("a") as told:
            told.write(done.stderr)
    if not done.stdout:
        raise SystemExit(f"{case.name}: {done.stderr}")
    return dict(json.loads(done.stdout))
