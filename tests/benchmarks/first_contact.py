"""How a search does on tasks and processors that did not shape it: run by `make bench-first-contact`.

The tasks are those in `unseen/`. oneDNN can make a processor behave like an older one, so each task has a recorded table for each
such *profile* that a machine could show. `--record` sweeps the tables, in three rounds, on one thread, and goes on where it ended
(half an hour on a quiet machine). Otherwise whole searches run over the tables that there are; nothing is trained.
`--search` really searches for a minute on one thread, under each profile, and then runs the answer and the table's best config in
turn, since the table may come from another processor and a search may try what the table does not vary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from autotune.techniques import find_techniques
from tests.benchmarks.searches import Scenario, Truth, searches, summary, write

ROOT = Path(__file__).parent.parent.parent
UNSEEN = Path(__file__).parent / "unseen"
PROFILES = {  # the processor's flag that each takes
    "avx2": "avx2",
    "avx512_core": "avx512bw",
    "avx512_core_bf16": "avx512_bf16",
    "avx512_core_amx": "amx_bf16",
}
ROUNDS = 3
GRIDS: Mapping[str, Mapping[str, str]] = {
    "cell_vae": {"batch_size": "64,128,256,512", "checkpoint_segments": "0,4", "optimizer_impl": "default,fused"},
    "click_cross": {"batch_size": "512,1024,2048", "checkpoint_segments": "0,5", "optimizer_impl": "default,fused"},
    "demand_lstm": {"batch_size": "16,32,64,128"},
    "scan_unet": {"batch_size": "4,8,16", "checkpoint_segments": "0"},
    "speech_ctc": {
        "batch_size": "8,16,32",
        "checkpoint_segments": "0",
        "optimizer_impl": "default,fused",
        "num_workers": "0,1",
        "persistent_workers": "false",
        "prefetch_factor": "2",
    },
    "tile_resnet": {
        "batch_size": "48",
        "checkpoint_segments": "0",
        "num_workers": "0,1",
        "persistent_workers": "false",
        "prefetch_factor": "2",
    },
}


def profiles() -> dict[str, dict[str, str]]:
    """The profiles that this machine can show, each with the environment that makes it."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return {name: {"ONEDNN_MAX_CPU_ISA": name.upper()} for name, flag in PROFILES.items() if flag in flags}


def table_of(task: str, profile: str) -> Path:
    """Where the table of a task under a profile is kept."""
    return UNSEEN / task / f"{profile}.csv"


def autotune(profile: str, *words: str) -> str:
    """Run a command of autotune on one thread under a profile, and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **profiles()[profile]}
    command = [sys.executable, "-m", "autotune", *words]
    return subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def record(tasks: Iterable[str], under: Iterable[str]) -> None:
    """Sweep what the tables lack."""
    for profile in under:
        for task in tasks:
            words = ["sweep", str(UNSEEN / task / "model.py"), "--out", str(table_of(task, profile))]
            for name, choices in GRIDS[task].items():
                words += ["--grid", f"{name}={choices}"]
            autotune(profile, *words, "--max-repeats", str(ROUNDS), "--quiet")
            print(f"{task} {profile}: recorded", file=sys.stderr, flush=True)


def unseen_tables(tasks: Iterable[str] = GRIDS) -> list[Path]:
    """The tables that are recorded, of each task under each profile."""
    return [path for task in tasks for profile in PROFILES if (path := table_of(task, profile)).exists()]


def replayed(tasks: Iterable[str], seeds: int, workers: int) -> list[str]:
    """Searches over the recorded tables, and which profiles they cover."""
    paths = unseen_tables(tasks)
    scenarios = [Scenario(path, tight) for path in paths for tight in (False, True)]
    found = searches(scenarios, ("cost-model",), seeds, workers, keep=None)
    missing = [name for name in PROFILES if not any(path.stem == name for path in paths)]
    lines = [f"{seeds} seeds a row.", "", *summary(found)]
    return [*lines, "", f"No table was recorded under {', '.join(missing)}."] if missing else lines


def really_searched(tasks: Iterable[str], under: Iterable[str], budget: str) -> list[str]:
    """Real searches: the speed of the answer as a share of what the table's best config reaches here and now."""
    lines = [
        f"| task | profile | the answer of `--budget {budget}` | its share of the table's best |",
        "|---|---|---|---|",
    ]
    for task in tasks:
        for profile in under:
            truth = Truth(Scenario(table_of(task, profile), tight=False))
            best = max(truth.speed, key=truth.speed.__getitem__)
            with tempfile.TemporaryDirectory() as folder:
                words = ["search", str(UNSEEN / task / "model.py"), "--budget", budget, "--json", "--quiet"]
                answer = json.loads(autotune(profile, *words, "--storage", f"sqlite:///{folder}/study.db"))
            contest: dict[str, list[float]] = {json.dumps(dict(config)): [] for config in (answer["config"], best)}
            for _ in range(ROUNDS):
                for config, speeds in contest.items():
                    words = ["probe", str(UNSEEN / task / "model.py"), "--config", config, "--json"]
                    speeds.append(json.loads(autotune(profile, *words))["measurement"]["samples_per_s"])
            won, bests = (statistics.median(speeds) for speeds in (*contest.values(), *contest.values())[:2])
            changes = find_techniques().describe(answer["config"])
            lines.append(f"| {task} | {profile} | {answer['verdict']}: {changes} | {won / bests:.1%} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    """Record, search for real, or replay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="sweep what the tables lack")
    parser.add_argument("--search", action="store_true", help="search for real")
    parser.add_argument("--budget", default="60s", help="of a real search")
    parser.add_argument("--tasks", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--profiles", nargs="+", default=list(profiles()), choices=list(profiles()), help="for both")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into the studies' README")
    options = parser.parse_args()
    if options.record:
        record(options.tasks, options.profiles)
        return
    if options.search:
        name, lines = "minutes", really_searched(options.tasks, options.profiles, options.budget)
    else:
        name, lines = "first contact", replayed(options.tasks, options.seeds, options.workers)
    print("\n".join(lines))
    if options.write:
        write(name, lines)


if __name__ == "__main__":
    main()
