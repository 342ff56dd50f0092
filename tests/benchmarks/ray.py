"""What a probe costs more through Ray than without, and what faults cost, on two nodes that this host plays. Run by `make bench-ray`."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from autotune.records.config import ProbeSettings
from autotune.runners.jobs import ProbeJob
from autotune.runners.local import LocalRunner
from autotune.runners.ray import RayRunner
from autotune.runners.runner import Runner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests import played_cluster as played_faults
from tests.benchmarks.searches import write
from tests.played_cluster import ROOT, Cost, Played, played_cluster, running, small_disk

TINY = ROOT / "tests" / "models" / "tiny.py"
REPEATS = 40
FAULTS: dict[str, Callable[[Played, RayRunner], Cost]] = {
    "SIGKILL of a probe": played_faults.kill_worker,
    "SIGKILL of an actor": played_faults.kill_actor,
    "a supervisor that hangs": played_faults.stop_supervisor,
    "a full disk": played_faults.fill_disk,
    "SIGKILL of a raylet": played_faults.kill_raylet,
    "a node gone": played_faults.remove_node,
    "a cluster that grows": played_faults.grow,
    "a cluster that shrinks to nothing": played_faults.shrink,
}


def probe_s(runner: Runner) -> float:
    """Seconds from asking for a probe, which ends as soon as it is up, until its outcome is there."""
    config = find_techniques().complete({"batch_size": 5})  # does not keep the global batch
    job = ProbeJob(config=config, settings=ProbeSettings(memory_limit_bytes=None))
    began_s = time.perf_counter()
    runner.run(job)
    return time.perf_counter() - began_s


def overhead(folder: Path) -> list[str]:
    """Local probes and probes through Ray in turns, on one machine."""
    source = TaskSource.of(TINY)
    with (
        LocalRunner(source, device="cpu", logs=folder / "local") as local,
        RayRunner(source, device="cpu", logs=folder / "ray") as ray,
    ):
        pairs = [(probe_s(local), probe_s(ray)) for _ in range(REPEATS)]
    here_s, there_s = (median(one) for one in zip(*pairs, strict=True))
    more_s = median(there - here for here, there in pairs)
    return [
        f"A probe that ends as soon as it is up, medians of {REPEATS} in turns: {here_s * 1e3:.0f} ms without Ray, {there_s * 1e3:.0f} ms "
        f"through a Ray on the same machine, {more_s * 1e3:.0f} ms more in the median of pairs (to reach: at most 50 ms)."
    ]


def row(name: str, cost: Cost) -> str:
    """A fault's row of the table."""
    back = "-" if cost.back_s is None else f"{cost.back_s:.1f} s"
    return f"| {name} | {cost.lost} | {cost.seen_s:.1f} s | {back} | {cost.left} |"


def faults(folder: Path) -> list[str]:
    """A table of faults, each with a cluster of its own."""
    lines = [
        "| fault | the probe that ran, or trials | until the search knows | until there are as many slots | processes left |",
        "|---|---|---|---|---|",
    ]
    for number, (name, fault) in enumerate(FAULTS.items()):
        own = folder / str(number)
        own.mkdir()
        with small_disk(own / "small") as small, played_cluster(small) as played, running(played, own) as runner:
            lines.append(row(name, fault(played, runner)))
    for number, name in enumerate(("SIGKILL of the driver, whose Ray goes too", "SIGKILL of the driver")):
        own = folder / f"driver{number}"
        own.mkdir()
        with small_disk(own / "small") as small, played_cluster(small) as played:
            lines.append(row(name, played_faults.kill_driver(played if number else None, own)))
    return lines


def main() -> None:
    """Measure, print, and write into the README if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", action="store_true", help="also what faults cost, which takes some ten minutes")
    parser.add_argument("--write", action="store_true", help="into studies/README.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = {"ray": overhead(Path(name))}
        if options.faults:
            found["ray faults"] = faults(Path(name))
    for section, lines in found.items():
        print("\n".join(lines))
        if options.write:
            write(section, lines)


if __name__ == "__main__":
    main()
