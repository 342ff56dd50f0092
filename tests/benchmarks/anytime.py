"""When the answer so far is nearly the final one: run by `make bench-anytime`.

A search that is ended early prints the best so far. The *anytime* figure is the number of seconds after which that answer is within 5 %
of the speed of the final answer, and stays so.

Over the recorded tables whole searches run as `autotune search --replay` does: the seconds are those of the recorded probes alone, and the
speeds are the table's. With `--live` six tasks are searched for a minute, on one thread, each within a memory limit that its global
batch exceeds: the seconds count from the command's start, imports and inspection included, and the speed of a config is the geometric
mean of all processes of the study that ran it. Beside them stand the seconds that the batch-size finders of Lightning and Accelerate
take within the same limit, as `make bench-peers` runs them: the call alone. What it takes to import them is measured apart.

With `--keep FILE` what that file holds is not run again, and the rest is added; the peers' answers are also read from one that
`bench-peers` kept. With `--write` the table goes into `studies/README.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autotune.devices.cpu import processor_model
from autotune.records.config import Config
from autotune.records.options import SearchOptions
from autotune.runners.replay import ReplayRunner
from autotune.techniques import find_techniques
from autotune.tuning.events import Event, Listener, ProbeEnded
from autotune.tuning.search import search as run_search
from autotune.units import plural
from tests.benchmarks.first_contact import unseen_tables
from tests.benchmarks.kept import Kept
from tests.benchmarks.memory import TABLES, WIDE_TABLES
from tests.benchmarks.peers import STUDIES, Answer, Study, ask_peers, prober_of
from tests.benchmarks.peers_worker import TOOLS
from tests.benchmarks.searches import HEADROOM, Scenario, Truth, write

techniques = find_techniques()

WORKER = Path(__file__).parent / "anytime_worker.py"
NEAR = 0.95  # of the final answer's speed
ALLOWED_S = 10.0  # that the answer may come later than a peer's
UNSEEN = "tests/benchmarks/unseen"
LIVE = (
    *STUDIES,
    Study("cell_vae", "400MiB", folder=UNSEEN),
    Study("scan_unet", "410MiB", folder=UNSEEN),
    Study("speech_ctc", "600MiB", folder=UNSEEN),
)


@dataclass(frozen=True, kw_only=True)
class Anytime:
    """When a search knew its answer, in seconds from its start.

    Attributes:
        probed_s: the first probe's end.
        first_s: the answer so far is near the final one for the first time.
        near_s: from then on it stays near.
        ended_s: the search's end.
    """

    probed_s: float
    first_s: float
    near_s: float
    ended_s: float

    @classmethod
    def of(cls, moments: Sequence[tuple[float, float]], ended_s: float, final: float) -> Anytime:
        """The figures of a search.

        Args:
            moments: seconds, and the true speed of the answer so far, after each probe; 0 where there was none.
            final: the true speed of the final answer.
        """
        near = [(seconds, speed >= NEAR * final) for seconds, speed in [*moments, (ended_s, final)]]
        num_before = max((number for number, (_, is_near) in enumerate(near, start=1) if not is_near), default=0)
        return cls(
            probed_s=near[0][0],
            first_s=next(seconds for seconds, is_near in near if is_near),
            near_s=near[num_before][0],
            ended_s=ended_s,
        )


class Moments(Listener):
    """Notes the answer so far after each probe."""

    def __init__(self) -> None:
        self.found: list[tuple[float, Config | None]] = []

    def on(self, event: Event) -> None:
        if isinstance(event, ProbeEnded):
            self.found.append((event.elapsed_s, event.best[0] if event.best else None))


def replay(path: Path, tight: bool, seed: int) -> Anytime:
    """A search over a table, which ends by itself."""
    truth, moments = Truth(Scenario(path, tight)), Moments()
    result = run_search(
        None,
        SearchOptions(memory_limit_bytes=truth.limit_bytes, headroom=HEADROOM, seed=seed, storage="sqlite:///:memory:"),
        runner=ReplayRunner(truth.table, seed=seed),
        listener=moments,
    )
    speeds = [(seconds, truth.speed[config] if config else 0.0) for seconds, config in moments.found]
    return Anytime.of(speeds, result.wall_s, truth.speed[techniques.complete(result.config)])


def replayed(paths: Sequence[Path], seeds: int, workers: int, kept: Kept) -> dict[str, list[Anytime]]:
    """Searches over tables, by task."""
    jobs = {
        f"{path.parent.name} {path.stem} {tight} {seed}": (path, tight, seed)
        for seed in range(seeds)
        for path in paths
        for tight in (False, True)
    }
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        known = kept.each(jobs, _replay, pool)
    found: dict[str, list[Anytime]] = {}
    for key, (path, _, _) in jobs.items():
        wide = ", all techniques" if path in WIDE_TABLES else ""
        found.setdefault(path.parent.name + wide, []).append(Anytime(**known[key]))
    return found


def _replay(path: Path, tight: bool, seed: int) -> dict[str, float]:
    return asdict(replay(path, tight, seed))


def recorded_table(found: Mapping[str, Sequence[Anytime]], seeds: int) -> Iterator[str]:
    """A row a task: medians over its tables, limits and seeds, and the most."""
    yield f"{plural(seeds, 'seed')} of each table, with and without a limit that binds; medians, and in brackets the most."
    yield ""
    yield "| tables of | searches | first probe | within 5 % for the first time | for good | the whole search |"
    yield "|---|---|---|---|---|---|"
    for name, mine in [*found.items(), ("all", [one for searches in found.values() for one in searches])]:
        columns = ("probed_s", "first_s", "near_s", "ended_s")
        cells = (_median_and_most([getattr(one, column) for one in mine]) for column in columns)
        yield f"| {name} | {len(mine)} | {' | '.join(cells)} |"


def _median_and_most(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f} s ({max(seconds):.0f} s)"


@dataclass(frozen=True)
class Live:
    """A task that was really searched.

    Attributes:
        begun_s: when the first probe began.
        peers: their answers, by tool.
    """

    study: Study
    verdict: str
    begun_s: float
    anytime: Anytime
    peers: Mapping[str, Answer]

    def is_soon(self, tool: str, import_s: float = 0.0) -> bool:
        """Whether the answer was there at most ten seconds after a peer's, to whose call its import may be added."""
        peer = self.peers[tool]
        return not peer.died and self.anytime.near_s <= import_s + peer.wall_s + ALLOWED_S


def time_import(package: str) -> float:
    """Seconds that a fresh interpreter takes to import a package: the median of three."""
    command = [sys.executable, "-c", f"import {package}"]
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        taken.append(time.perf_counter() - started)
    return median(taken)


def search_live(study: Study, budget: str) -> list[dict[str, Any]]:
    """What a search of a task told, in the order in which it came."""
    with tempfile.TemporaryDirectory() as folder:
        began = ["--began", repr(time.monotonic())]
        done = subprocess.run(
            [sys.executable, str(WORKER), str(study.model), *began, "--budget", budget, "--memory-limit", study.memory_limit,
             "--storage", f"{folder}/study.db", "--include", *study.allowed],
            env={**os.environ, **study.environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{study.name}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def true_speeds(told: Iterable[Mapping[str, Any]]) -> dict[Config, float]:
    """The geometric mean of all processes that ran a config."""
    logs: dict[Config, list[float]] = {}
    for one in told:
        if one.get("samples_per_s"):
            logs.setdefault(techniques.complete(one["config"]), []).append(math.log(one["samples_per_s"]))
    return {config: math.exp(fmean(values)) for config, values in logs.items()}


def really_searched(study: Study, budget: str, tools: Sequence[str], kept: Kept) -> Live:
    """Search a task, and have the peers do what they do."""
    told = kept.once(f"{study.label}: anytime within {budget}", lambda: search_live(study, budget))
    with tempfile.TemporaryDirectory() as name, prober_of(study, Path(name)) as prober:
        peers: list[Answer] = ask_peers(study, tools, prober, Path(name), kept)
    speeds = true_speeds(told)
    moments = [
        (one["elapsed_s"], speeds[techniques.complete(one["best"])] if one["best"] else 0.0)
        for one in told
        if "best" in one
    ]
    end = told[-1]
    return Live(
        study=study,
        verdict=end["verdict"],
        begun_s=next(one["elapsed_s"] for one in told if one.get("begins") == "probe"),
        anytime=Anytime.of(moments, end["elapsed_s"], speeds[techniques.complete(end["answer"])]),
        peers={answer.tool: answer for answer in peers},
    )


def live_table(found: Sequence[Live], budget: str, imports_s: Mapping[str, float]) -> Iterator[str]:
    """A row a task, and how many answers came soon enough.

    Args:
        imports_s: seconds that the import of each tool takes.
    """
    tools = list(imports_s)
    yield f"Searches of {budget} on one thread of an {processor_model()}, seconds from the command's start."
    yield ""
    yield (
        "| task, limit | told | first probe begins | ends | within 5 % for the first time | for good | "
        f"{' | '.join(tools)} | at most {ALLOWED_S:.0f} s after |"
    )
    yield f"|{'---|' * (7 + len(tools))}"
    for one in found:
        times = one.anytime
        seconds = (f"{s:.1f} s" for s in (one.begun_s, times.probed_s, times.first_s, times.near_s))
        theirs = (f"{'died after ' * peer.died}{peer.wall_s:.1f} s" for peer in one.peers.values())
        after = ", ".join(filter(one.is_soon, tools)) or "none"
        yield f"| {one.study.label} | {one.verdict} | {' | '.join([*seconds, *theirs])} | {after} |"
    yield ""
    yield f"The answer was within 5 % for good after {median(one.anytime.near_s for one in found):.1f} s in the median."
    for tool in tools:
        answered = [one for one in found if not one.peers[tool].died]
        middle_s = median(one.peers[tool].wall_s for one in answered)
        near_s = median(one.anytime.near_s for one in answered)
        later_s = median(one.anytime.near_s - one.peers[tool].wall_s for one in answered)
        alone = sum(one.is_soon(tool) for one in answered)
        imported = sum(one.is_soon(tool, imports_s[tool]) for one in answered)
        yield ""
        when = f"{abs(later_s):.1f} s {'earlier' if later_s < 0 else 'later'}"
        yield (
            f"{tool} answered {len(answered)} of {len(found)}, after {middle_s:.1f} s in the median (autotune on the same: "
            f"{near_s:.1f} s). Task by task autotune's answer came {when} in the median; it came at most {ALLOWED_S:.0f} s after {alone} "
            f"of them, and after {imported} where the {imports_s[tool]:.1f} s of its import count as autotune's do."
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", action="store_true", help="really search, and run the peers")
    parser.add_argument("--tasks", nargs="+", choices=[one.name for one in LIVE], help="of --live")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="of --live")
    parser.add_argument("--budget", default="60s", help="of --live")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of what need not be run again")
    parser.add_argument("--write", action="store_true", help="into the studies' README")
    options = parser.parse_args()
    kept = Kept(options.keep)
    if options.live:
        chosen = [one for one in LIVE if one.name in (options.tasks or (one.name,))]
        found = [really_searched(study, options.budget, options.tools, kept) for study in chosen]
        packages = {tool: tool.split(",")[0].lower() for tool in options.tools}
        imports_s = {
            tool: kept.once(f"import of {package}", lambda package=package: time_import(package))
            for tool, package in packages.items()
        }
        lines = list(live_table(found, options.budget, imports_s))
    else:
        paths = [path.absolute() for path in (*TABLES, *WIDE_TABLES, *unseen_tables())]
        lines = list(recorded_table(replayed(paths, options.seeds, options.workers, kept), options.seeds))
    print("\n".join(lines))
    if options.write:
        write("anytime live" if options.live else "anytime", lines)


if __name__ == "__main__":
    main()
