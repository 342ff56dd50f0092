"""How good memory predictions are, over the configs of the recorded tables: run by `make bench-memory`.

Three questions: the allocator's peak before any probe, against what torch's own profiler counts over the same training
steps; the process's peak, which the memory limit is about, after two probes of the study; and the time that tracing takes.
The profiler's counts are kept in `studies/*/*.allocator.csv`, since counting takes minutes: `--count 50` counts until there
are 50 of each table, in the (shuffled) order in which the table was recorded.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from autotune.prediction.memory import MemoryModel
from autotune.prediction.traces import Traces
from autotune.records.config import Config
from autotune.records.inspection import Inspection
from autotune.runners import table
from autotune.runners.jobs import InspectJob
from autotune.runners.local import LocalRunner
from autotune.runners.table import Table
from autotune.space import Space, build_space
from autotune.task import load_task
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques

STUDIES = Path(__file__).parent.parent.parent / "studies"
WIDE_TABLES = sorted(STUDIES.glob("*/*.wide.csv"))  # of nearly all techniques at once
TABLES = sorted(
    path for path in STUDIES.glob("*/*.csv") if not path.name.endswith((".allocator.csv", ".wide.csv", ".2.csv"))
)
NUM_PAIRS = 30  # of the two probes that the memory model is given
TRACE_TIMEOUT_S = 600.0


def space_of(recorded: Table) -> Space:
    """The space that a table was swept over, as a search sees it."""
    return build_space(recorded.header.inspection(find_techniques()), find_techniques())[0]


def study_file(path: Path) -> Path:
    """The model file of a table."""
    return path.parent / "model.py"


def traces_of(recorded: Table) -> tuple[Traces, float]:
    """The traces of a table's configs, and the seconds that tracing them took."""
    source = TaskSource.of(study_file(recorded.path))
    target = "cpu" if recorded.header.device == "cpu" else "cuda"
    with tempfile.TemporaryDirectory() as logs, LocalRunner(source, device="cpu", logs=Path(logs)) as runner:
        # finds out which samples of the dataset are the widest
        inspection = runner.run(InspectJob(memory_limit_bytes=None, timeout_s=TRACE_TIMEOUT_S))
        assert isinstance(inspection, Inspection), inspection
        started = time.monotonic()
        traces = runner.trace(space_of(recorded).tracing(), target, TRACE_TIMEOUT_S)
        return traces, time.monotonic() - started


def allocator_file(path: Path) -> Path:
    """Where the profiler's counts of a table's configs are kept."""
    return path.with_suffix(".allocator.csv")


def counted(recorded: Table) -> dict[Config, int]:
    """The profiler's counts, as far as there are any."""
    path = allocator_file(recorded.path)
    if not path.exists():
        return {}
    swept = recorded.header.choices  # techniques may have come since, and their order may be another
    by_choices = {
        frozenset(f"{name}={choice}" for name, choice in config.choices if name in swept): config
        for config in recorded.figures
    }
    with path.open() as file:
        return {by_choices[frozenset(row["config"].split())]: int(row["peak_bytes"]) for row in csv.DictReader(file)}


def count(recorded: Table, num: int) -> None:
    """Train two steps of configs under the profiler, each in a process of its own, and keep the peaks."""
    path = allocator_file(recorded.path)
    known = counted(recorded)
    if not path.exists():
        path.write_text("config,peak_bytes\n")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "autotune.session"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        left = [config for config in recorded.figures if config not in known][: max(0, num - len(known))]
        jobs = [(study_file(recorded.path), config) for config in left]
        for number, (config, peak_bytes) in enumerate(pool.imap(_count_one, jobs, chunksize=1), start=1):
            with path.open("a") as file:
                file.write(f"{_name(config)},{peak_bytes}\n")
            print(f"{path.name}: {number} of {len(jobs)}", end="\r")


def _count_one(job: tuple[Path, Config]) -> tuple[Config, int]:
    from tests.prediction.real_memory import real_peak_bytes

    file, config = job
    return config, real_peak_bytes(load_task(file), config)


def _name(config: Config) -> str:
    return " ".join(f"{name}={choice}" for name, choice in config.choices)


def before_any_probe(recorded: Table, traces: Traces) -> Iterator[float]:
    """Relative error of each config's traced peak."""
    for config, peak_bytes in counted(recorded).items():
        traced = traces.peak(config, find_techniques())
        if traced is not None:
            yield traced.peak_bytes / peak_bytes - 1


def after_two_probes(recorded: Table, traces: Traces) -> Iterator[tuple[Config, float]]:
    """Relative error of each config's process's peak, but of the two probed: the baseline and one drawn at random.

    Of a config's repeats the one with the largest peak counts.
    """
    space, configs = space_of(recorded), list(recorded.figures)
    measured = {
        c: [row.outcome.measurement for row in rows if row.outcome.measurement] for c, rows in recorded.repeats.items()
    }
    peaks = {config: max(found, key=lambda one: one.peak_bytes) for config, found in measured.items() if found}
    for seed in range(NUM_PAIRS):
        second = random.Random(seed).choice([config for config in configs if config != space.baseline])
        probed = {config: recorded.repeats[config][0].outcome for config in (space.baseline, second)}
        model = MemoryModel(traces, recorded.header.outside_bytes, space, list(probed.items()))
        largest = {config: found for config, found in peaks.items() if config not in probed}
        for config, estimate in zip(largest, model.estimates(list(largest)), strict=True):
            assert estimate is not None
            yield config, estimate.peak_bytes / largest[config].peak_bytes - 1


def row(name: str, errors: Sequence[float]) -> str:
    """One line of the table."""
    absolute = np.abs(errors)
    median, high = np.median(absolute), np.quantile(absolute, 0.95)
    under = float(np.mean(np.array(errors) < 0))
    return f"| {name} | {len(errors)} | {median:.2%} | {high:.2%} | {absolute.max():.1%} | {under:.0%} |"


def report(
    found: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    apart: Mapping[str, Sequence[float]],
    times: Mapping[str, tuple[int, float]],
) -> list[str]:
    """The Markdown tables; `apart` are errors that stand on lines of their own."""
    head = ["| table | predictions | median error | 95th percentile | largest | too low |", "|---|---|---|---|---|---|"]
    lines = ["The allocator's peak, before any probe, against the profiler's count:", "", *head]
    lines += [row(name, before) for name, (before, _) in found.items()]
    lines += [row("all", [error for before, _ in found.values() for error in before]), ""]
    lines += ["The process's peak, which the limit is about, after two probes (the baseline and another):", "", *head]
    lines += [row(name, after) for name, (_, after) in found.items()]
    lines += [row("all", [error for _, after in found.values() for error in after])]
    lines += [*(row(f"{name}, not in `all`", errors) for name, errors in apart.items()), ""]
    listed = ", ".join(f"`{name}` {num} groups in {seconds:.1f} s" for name, (num, seconds) in times.items())
    return [*lines, f"Tracing, without a cache, on one core: {listed}."]


def main() -> None:
    """Count what is missing if asked to, predict, compare, print."""
    from tests.benchmarks.searches import write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=0, help="configs of each table to know the allocator's peak of")
    parser.add_argument(
        "--write", action="store_true", help="into the studies' README, and the traces beside the tables"
    )
    parser.add_argument("--tables", nargs="+", type=Path, default=TABLES)
    options = parser.parse_args()
    found, apart, times = {}, {}, {}
    for path in options.tables:
        recorded = table.read(path.absolute(), find_techniques())
        name = f"{path.parent.name} {path.stem}"
        if options.count:
            count(recorded, options.count)
        traces, wall_s = traces_of(recorded)
        if options.write:
            table.write_traces(path, traces)
        times[name] = (len(traces.models) + len(traces.updates), wall_s)
        after = list(after_two_probes(recorded, traces))
        # oneDNN compiles and keeps kernels for every shape of a short type, which no trace shows: probes teach it
        many_shapes = traces.lengths is not None and len(traces.lengths.quantiles) > 1
        kept = [error for config, error in after if many_shapes and config["amp"] == "bf16"]
        if kept:
            apart[f"{name} bf16"] = kept
        others = [error for config, error in after if not (many_shapes and config["amp"] == "bf16")]
        found[name] = (list(before_any_probe(recorded, traces)), others)
    lines = report(found, apart, times)
    print("\n".join(lines))
    if options.write:
        write("memory", lines)


if __name__ == "__main__":
    main()
