"""What several slots gain, and what they cost: run by `make bench-slots`.

Whole searches over recorded tables, and over closed forms whose gains are drawn by the seed, with 1, 2, 4 and 8 slots. Every probe takes
its recorded seconds on the runner's clock, several at once; neighbours do not slow each other down there. With `--write` a table goes
into `studies/README.md`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autotune.records.config import Config, ProbeSettings
from autotune.records.options import SearchOptions
from autotune.records.outcome import Outcome
from autotune.records.study import PLAY_OFF
from autotune.runners.jobs import Job, ProbeJob
from autotune.runners.replay import ReplayRunner
from autotune.runners.runner import Runner
from autotune.space import build_space
from autotune.techniques import find_techniques
from autotune.tuning.events import Event, Listener, ProbeEnded
from autotune.tuning.search import search as run_search
from tests.benchmarks.memory import TABLES
from tests.benchmarks.searches import HEADROOM, MAX_PROBES, NEAR, Scenario, Truth, write
from tests.closed_form import LIMIT_BYTES, MIB, ClosedFormRunner, inspection

techniques = find_techniques()

WIDTHS = (1, 2, 4, 8)
DEMANDED = {2: 1.8, 4: 3.2, 8: 5.0}  # times as soon within 2 %
NOISE = 0.02  # between processes of a closed form
PROBE_S = 5.0  # of a closed form's probe, give or take a fifth


class Drawn(ClosedFormRunner):
    """A closed form whose gains and sizes are drawn, on a clock on which probes take seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        draw = random.Random(f"closed form {self.seed}")
        self._amp = {"off": 1.0, "bf16": draw.uniform(0.8, 2.0), "fp16": draw.uniform(0.8, 1.6)}
        self._segment = draw.uniform(0.01, 0.08)
        self._fused = draw.uniform(0.98, 1.12)
        self._half = draw.uniform(1.0, 12.0)
        self._sample_mib, self._saved = draw.uniform(25, 90), draw.uniform(0.05, 0.14)

    def now_s(self) -> float:
        return self.passed_s

    def takes_s(self, job: Job[Any], result: Any) -> float:
        return result.wall_s if isinstance(job, ProbeJob) else 0.0

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        return replace(super().outcome_of(config, settings), wall_s=PROBE_S * self._random.uniform(0.8, 1.2))

    def samples_per_s(self, config: Config) -> float:
        gain = self._amp[str(config["amp"])] * (1 - self._segment * int(config["checkpoint_segments"]))
        gain *= self._fused if config["optimizer_impl"] == "fused" else 1.0
        return 100 * gain * config.batch_size / (config.batch_size + self._half)

    def peak_bytes(self, config: Config) -> int:
        half = 1.0 if config["amp"] == "off" else 0.65
        kept = self._sample_mib * half * (1 - self._saved * int(config["checkpoint_segments"]))
        return int((200 + kept * config.batch_size) * MIB)


@dataclass(frozen=True)
class Run:
    """What one search did. Shares are of the optimum.

    Attributes:
        ends_s: when each probe before the play-off ended.
        shares: the best feasible config then, by its true figures.
        regret: what the answer lacks, after the play-off.
    """

    source: str
    width: int
    seed: int
    ends_s: tuple[float, ...]
    shares: tuple[float, ...]
    regret: float
    near: float

    @property
    def near_s(self) -> float:
        """Seconds until near the optimum; those of the whole search where it never came near."""
        reached = (end for end, share in zip(self.ends_s, self.shares, strict=True) if share >= self.near)
        return next(reached, self.ends_s[-1])

    def regret_after(self, num_probes: int) -> float:
        """What the best of so many probes lacks."""
        return 1 - self.shares[min(num_probes, len(self.shares)) - 1]

    def regret_at(self, seconds: float) -> float:
        """What the best by then lacks; the baseline's before any probe has ended."""
        return 1 - next(
            (
                share
                for end, share in reversed([*zip(self.ends_s, self.shares, strict=True)])
                if end <= seconds * (1 + 1e-9)
            ),
            self.shares[0],
        )


class Watch(Listener):
    """Notes when each probe before the play-off ended."""

    def __init__(self, runner: Runner) -> None:
        self.configs: list[Config] = []
        self.ends_s: list[float] = []
        self._runner = runner

    def on(self, event: Event) -> None:
        if isinstance(event, ProbeEnded) and event.trial.stage != PLAY_OFF:
            self.configs.append(event.trial.config)
            self.ends_s.append(self._runner.now_s())


def run(source: str, scenario: Scenario | None, width: int, seed: int) -> Run:
    """One search of a table, or of a closed form."""
    runner: Runner
    if scenario is not None:
        truth = Truth(scenario)
        runner = ReplayRunner(truth.table, seed=seed, num_slots=width)
        speed, limit_bytes, near = truth.speed, truth.limit_bytes, truth.near
    else:
        form = runner = Drawn(noise=NOISE, seed=seed, num_slots=width)
        limit_bytes, near = LIMIT_BYTES, NEAR
        space, _ = build_space(inspection(), techniques)
        usable_bytes = (1 - HEADROOM) * limit_bytes
        speed = {c: form.samples_per_s(c) if form.peak_bytes(c) <= usable_bytes else 0.0 for c in space}
    watch = Watch(runner)
    options = SearchOptions(
        budget_s=1e6,
        num_trials=MAX_PROBES,
        memory_limit_bytes=limit_bytes,
        headroom=HEADROOM,
        seed=seed,
        storage="sqlite:///:memory:",
    )
    result = run_search(None, options, runner=runner, listener=watch)
    optimum, best, shares = max(speed.values()), 0.0, []
    for config in watch.configs:
        best = max(best, speed[config] / optimum)
        shares.append(best)
    answer = speed[techniques.complete(result.config)]
    return Run(source, width, seed, tuple(watch.ends_s), tuple(shares), 1 - answer / optimum, near)


def runs(tables: Sequence[Path], num_seeds: int, workers: int) -> list[Run]:
    """Every table within both limits, and a closed form for each seed, at every width."""
    scenarios = [Scenario(path.absolute(), tight) for path in tables for tight in (False, True)]
    jobs: list[tuple[str, Scenario | None, int, int]] = [
        ("closed forms", None, width, seed) for width in WIDTHS for seed in range(2 * num_seeds)
    ]
    jobs += [("tables", one, width, seed) for one in scenarios for width in WIDTHS for seed in range(num_seeds)]
    names = [f"{source} {scenario.name if scenario else seed}" for source, scenario, _, seed in jobs]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.map(run, *zip(*jobs, strict=True))
        return [replace(one, source=f"{one.source}|{name}") for one, name in zip(found, names, strict=True)]


def summary(found: Sequence[Run]) -> list[str]:
    """A Markdown table: a row for each kind of source and number of slots."""
    lines = [
        "| searches of | slots | within 2 % as soon (median of searches) | demanded | never | probes | regret after as many probes | "
        "regret at the same time | regret of the answer |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    alone = {(one.source, one.seed): one for one in found if one.width == 1}
    for kind in dict.fromkeys(one.source.partition("|")[0] for one in found):
        for width in WIDTHS:
            mine = [one for one in found if one.width == width and one.source.startswith(f"{kind}|")]
            pairs = [(one, alone[one.source, one.seed]) for one in mine]
            sooner = math.exp(fmean(math.log(one.near_s) for _, one in pairs)) / math.exp(
                fmean(math.log(one.near_s) for one, _ in pairs)
            )
            ratios = median(other.near_s / one.near_s for one, other in pairs)
            after = fmean(one.regret_after(len(other.shares)) for one, other in pairs)
            at = fmean(one.regret_at(other.near_s / 2) for one, other in pairs)
            never = sum(one.shares[-1] < one.near for one in mine) / len(mine)
            lines.append(
                f"| {kind} | {width} | {sooner:.2f}x ({ratios:.2f}x) | {f'{DEMANDED[width]:g}x' if width in DEMANDED else ''} | "
                f"{never:.0%} | {median(len(one.shares) for one in mine):g} | {after:.1%} | {at:.1%} | "
                f"{fmean(one.regret for one in mine):.1%} |"
            )
    return lines


def main() -> None:
    """Run, print, and write into the README if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--tables", nargs="*", type=Path, default=TABLES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into studies/README.md")
    options = parser.parse_args()
    found = runs(options.tables, options.seeds, options.workers)
    of_tables = f", {options.seeds} seeds of each table and limit" if options.tables else ""
    lines = [f"{2 * options.seeds} closed forms{of_tables}.", "", *summary(found)]
    print("\n".join(lines))
    if options.write:
        write("slots", lines)


if __name__ == "__main__":
    main()
