"""A search of two processes, end to end: what the second one adds is told without a search of one."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tests.room import limit_bytes
from tests.short_play_off import AUTOTUNE

STEADY = Path(__file__).parent.parent / "models" / "steady.py"


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run([*AUTOTUNE, *arguments], cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_search_of_two_processes_tells_what_one_of_them_trains_alone(tmp_path: Path) -> None:
    shutil.copy(STEADY, tmp_path)
    limit = ("--memory-limit", str(limit_bytes(800)))
    found = run(
        tmp_path, "search", "steady.py", "--devices", "cpu:2", "--budget", "60s", "--trials", "1", *limit, "--json"
    )
    result = json.loads(found)
    one = result["one_device"]
    assert (one["config"]["batch_size"], one["config"]["accumulation_steps"]) == (4, 12)
    assert one["num_processes"] >= 1, one["failure"]
    assert one["peak_bytes"] > 0
    low, high = one["efficiency_ci"]
    assert 0 < low <= one["efficiency"] <= high
    study = next(str(path) for path in tmp_path.glob("studies/*.db"))
    shown = run(tmp_path, "show", study)
    assert "memory of each" in shown
    assert "as fast on 2 as on 1" in " ".join(shown.split())
