"""What the package costs: probe start, time outside training, imports. Run by `make bench`; prints a table, asserts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from autotune.records.config import ProbeSettings
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques

techniques = find_techniques()

ROOT = Path(__file__).parent.parent.parent
TINY = ROOT / "tests" / "models" / "tiny.py"
BUDGET_S = 120
REPEATS = 15


def process_s(*arguments: str) -> float:
    """Median wall time of a Python process."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        times.append(time.perf_counter() - started)
    return median(times)


def start_s(folder: Path, *, fork: bool) -> float:
    """Median time from asking for a probe until the user's task is there to run, in its own process, and back."""
    config = techniques.complete(
        {"batch_size": 5}
    )  # does not keep the global batch: ends the probe as soon as it is up
    settings = ProbeSettings(memory_limit_bytes=None)
    with LocalRunner(TaskSource.of(TINY), device="cpu", logs=folder, fork=fork) as prober:
        return median(prober.probe(config, settings).wall_s for _ in range(REPEATS if fork else 5))


def search_share(folder: Path) -> tuple[float, dict[str, object]]:
    """Share of a search's wall time outside training steps, on the `gpt` study."""
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "search", str(ROOT / "studies" / "gpt" / "model.py"), "--device", "cpu", "--budget",
         f"{BUDGET_S}s", "--storage", str(folder / "bench.db"), "--json", "--quiet"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    result = json.loads(done.stdout)
    return 1 - result["train_s"] / result["wall_s"], result


def main() -> None:
    """Measure and print."""
    table = Table("figure", "measured", "to reach")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        forked, fresh = start_s(folder, fork=True), start_s(folder, fork=False)
        table.add_row("probe start, fork server", f"{forked * 1e3:.1f} ms", "")
        table.add_row("probe start, new interpreter", f"{fresh * 1e3:.0f} ms", "")
        table.add_row("fork server against new interpreter", f"{fresh / forked:.0f}x", ">= 20x")
        bare = process_s("-c", "pass")
        for label, arguments in (
            ("import autotune", ("-c", "import autotune")),
            ("autotune --help", ("-m", "autotune", "--help")),
        ):
            table.add_row(label, f"{process_s(*arguments) * 1e3:.0f} ms", f"< {2e3 * bare + 100:.0f} ms")
        if "--quick" not in sys.argv:
            share, result = search_share(folder)
            table.add_row(f"search of gpt, {BUDGET_S} s: time outside training steps", f"{share:.1%}", "<= 20 %")
            table.add_row("  probes", str(result["probes"]), "")
    Console(width=100, no_color="NO_COLOR" in os.environ).print(table)


if __name__ == "__main__":
    main()
