"""What compiling adds to the answer of a search without it, and when that is won back: run by `make bench-compiled`.

For each study a search that compiles nothing gives the answer. It then runs as it is and compiled, in fresh processes in turn, on
one thread. With `--write` the table goes into `studies/README.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autotune.records.config import Config, ProbeSettings
from autotune.records.outcome import Outcome
from autotune.runners.local import LocalRunner
from autotune.study.figures import measured, ratio_interval
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.tuning.why import break_even
from autotune.units import format_seconds, plural
from tests.benchmarks.searches import write

describe = find_techniques().describe
techniques = find_techniques()

STUDIES = Path(__file__).parent.parent.parent / "studies"
NAMES = ("digits", "gpt", "tagger")
SETTINGS = ProbeSettings(memory_limit_bytes=None, max_timed_s=3.0, timeout_s=900.0)


def answer_of(study: str, budget: str, folder: Path) -> dict[str, Any]:
    """The answer of a search that compiles nothing."""
    command = [sys.executable, "-m", "autotune", "search", str(STUDIES / study / "model.py"), "--exclude", "compile"]
    command += ["--budget", budget, "--storage", str(folder / "search.db"), "--json", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    config: dict[str, Any] = json.loads(done.stdout)["config"]
    return config


def runs_of(study: str, configs: tuple[Config, ...], rounds: int, folder: Path) -> list[list[Outcome]]:
    """The outcomes of each config, by round."""
    source = TaskSource.of(STUDIES / study / "model.py")
    with LocalRunner(source, device="cpu", logs=folder / "logs") as runner:
        runner.keep_compiled(folder / "compiled")
        turns = [[runner.probe(config, SETTINGS) for config in configs] for _ in range(rounds)]
    return [list(outcomes) for outcomes in zip(*turns, strict=True)]


def with_compiling(config: Config) -> Config:
    """The config compiled, without what does not go with that."""
    compiled = config.replace(compile="default")
    excluded = [technique for technique in techniques.values() if technique.conflict(compiled)]
    return compiled.replace(**{technique.name: technique.off for technique in excluded})


def row(study: str, budget: str, rounds: int) -> str:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = techniques.complete(answer_of(study, budget, folder))
        compiled = with_compiling(plain)
        outcomes = runs_of(study, (plain, compiled), rounds, folder)
    failed = next((o.cause for found in outcomes for o in found if o.measurement is None), "")
    if failed:
        return f"| {study} | {describe(plain)} | {failed} | | | | |"
    pairs = [[o.measurement for o in turn if o.measurement] for turn in zip(*outcomes, strict=True)]
    speed, low, high = ratio_interval([math.log(b.samples_per_s / a.samples_per_s) for a, b in pairs])
    of_plain, of_compiled = measured(plain, outcomes[0]), measured(compiled, outcomes[1])
    cold_s = max(b.compile_cold_s for _, b in pairs)
    cached_s = min(b.compile_s for _, b in pairs)
    paid = break_even(compiled.samples_per_step, of_compiled, of_plain, cold_s)
    when = f"{plural(paid[0], 'step')}, {paid[1] / 3600:.2g} h" if paid else "never"
    memory = of_compiled.peak_bytes / of_plain.peak_bytes
    return (
        f"| {study} | {describe(plain)} | {speed:.2f}x ({low:.2f}x to {high:.2f}x) | {memory:.2f}x | "
        f"{format_seconds(cold_s)} | {format_seconds(cached_s)} | {when} |"
    )


def main() -> None:
    """Search, compare, print, and write into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", default="2m", help="of each search")
    parser.add_argument("--studies", nargs="+", default=NAMES)
    parser.add_argument("--write", action="store_true", help="into the studies' README")
    options = parser.parse_args()
    lines = [
        "| study | answer without compiling | compiled: speed | peak memory | to compile | from the cache | won back after |",
        "|---|---|---|---|---|---|---|",
    ]
    for study in options.studies:
        lines.append(row(study, options.budget, options.rounds))
        print(lines[-1], flush=True)
    if options.write:
        write("compiled", lines)


if __name__ == "__main__":
    main()
