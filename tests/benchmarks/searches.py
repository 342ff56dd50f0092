"""How good each search strategy is, over recorded tables of real training: run by `make bench-searches`.

Every strategy is a whole search over a recorded table, as `autotune search --replay` runs it: each probe is one of the recorded
repeats, drawn by the seed. Each table is searched without a memory limit that binds, and within one
that about half of its configs exceed. `doubling` is what batch-size finders do: plain fp32 training, the batch
doubled until it fails. With `--write` a table and a plot go into `studies/README.md`; with `--keep FILE` searches that FILE
holds are not run again, and the others are added to it.

`--wide` searches the tables of nearly all techniques at once (`*.wide.csv`), for five minutes and for an hour of the table's own
clock, and holds the two answers against each other.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from autotune.records.config import Config
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind
from autotune.records.study import PLAY_OFF
from autotune.runners import table
from autotune.runners.replay import ReplayRunner
from autotune.runners.table import Table
from autotune.techniques import find_techniques
from autotune.tuning.events import Event, Listener, ProbeEnded
from autotune.tuning.search import search as run_search
from tests.benchmarks.memory import TABLES, WIDE_TABLES, space_of

techniques = find_techniques()

ROOT = Path(__file__).parent.parent.parent
STUDIES = ROOT / "studies"
README, PLOT = STUDIES / "README.md", STUDIES / "searches.svg"
STRATEGIES = ("cost-model", "gp", "tpe", "random", "doubling")
BUDGETS_S = {"five minutes": 300.0, "an hour": 3600.0}  # of the cost model, as strategies over the wide tables
HEADROOM = 0.05
MAX_PROBES = 40
NEAR = 0.98  # of the optimum: within 2 %, or within the table's own interval of the optimum where that is wider
EXCEEDING = 0.5  # share of a table's configs that a tight memory limit rules out, as far as the baseline allows


@dataclass(frozen=True)
class Scenario:
    """A table, searched within a memory limit."""

    path: Path
    tight: bool

    @property
    def name(self) -> str:
        """`gpt cpu, tight`."""
        return f"{self.path.parent.name} {self.path.stem}, {'half of it fits' if self.tight else 'all of it fits'}"


@dataclass(frozen=True)
class Search:
    """What one search did, in the table's own figures.

    Attributes:
        shares: after each probe, the best feasible config so far as a share of the table's optimum.
        regret: what the answer lacks of the optimum, after the play-off.
        near: the share of the optimum that counts as near.
        wall_s: on the table's clock, play-off included; 0 where there is none.
    """

    scenario: Scenario
    strategy: str
    seed: int
    shares: tuple[float, ...]
    num_oom: int
    regret: float
    near: float = NEAR
    wall_s: float = 0.0

    @property
    def probes_until_near(self) -> float:
        """Probes until near the optimum; endless when the search ended before."""
        return next((n for n, share in enumerate(self.shares, start=1) if share >= self.near), math.inf)


class Truth:
    """What a table says of every config within a limit."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.table = scenario, read(scenario.path)
        self.limit_bytes = limit_bytes(self.table, tight=scenario.tight)
        usable_bytes = self.limit_bytes * (1 - HEADROOM)
        self.speed = {
            config: figure.samples_per_s if figure.peak_bytes <= usable_bytes else 0.0
            for config, figure in self.table.figures.items()
        }
        best = max(self.speed, key=lambda config: self.speed[config])
        self.optimum = self.speed[best]
        self.near = min(NEAR, 1 - self.table.figures[best].half_width)

    def shares(self, configs: Sequence[Config]) -> tuple[float, ...]:
        """The best so far after each config, as a share of the optimum."""
        return tuple(np.maximum.accumulate([self.speed[config] / self.optimum for config in configs]).tolist())

    def num_oom(self, configs: Sequence[Config]) -> int:
        """How many of the configs ran out of memory."""
        return sum(self.table.figures[config].peak_bytes > self.limit_bytes for config in configs)


@lru_cache
def read(path: Path) -> Table:
    """A table, read once a process."""
    return table.read(path, find_techniques())


def limit_bytes(recorded: Table, *, tight: bool) -> int:
    """A limit that everything fits, or one that half of the configs exceed but the baseline does not."""
    peaks = [figure.peak_bytes for figure in recorded.figures.values()]
    if not tight:
        return int(max(peaks) / (1 - HEADROOM)) + 1
    baseline_bytes = recorded.figures[space_of(recorded).baseline].peak_bytes
    return int(max(float(np.quantile(peaks, 1 - EXCEEDING)), 1.01 * baseline_bytes) / (1 - HEADROOM)) + 1


def doubling(truth: Truth) -> list[Config]:
    """Plain fp32 training at the table's batch sizes, doubled until it fails; the last that fits is the answer."""
    space = space_of(truth.table)
    sizes = sorted(int(size) for size in space.choices["batch_size"])
    tried, size = [], sizes[0]
    while True:
        config = space.complete({**space.baseline.as_dict(), "batch_size": size})
        tried.append(config)
        larger = [other for other in sizes if size < other <= 2 * size]
        if not larger or truth.num_oom([config]):
            return tried
        size = larger[-1]


def run(scenario: Scenario, strategy: str, seed: int) -> Search:
    """One search."""
    truth = Truth(scenario)
    if strategy == "doubling":
        tried = doubling(truth)
        fitting = [config for config in tried if truth.speed[config]]
        answer = truth.speed[fitting[-1]] if fitting else 0.0
        return Search(
            scenario, strategy, seed, truth.shares(tried), truth.num_oom(tried), 1 - answer / truth.optimum, truth.near
        )
    watch = Watch()
    budget_s = BUDGETS_S.get(strategy)
    result = run_search(
        None,
        SearchOptions(
            budget_s=budget_s or 1e6,
            num_trials=None if budget_s else MAX_PROBES,
            memory_limit_bytes=truth.limit_bytes,
            headroom=HEADROOM,
            sampler="cost-model" if budget_s else strategy,
            seed=seed,
            storage="sqlite:///:memory:",
        ),
        runner=ReplayRunner(truth.table, seed=seed),
        listener=watch,
    )
    answer = techniques.complete(result.config)
    regret = 1 - truth.speed[answer] / truth.optimum
    shares = truth.shares(watch.configs)
    return Search(scenario, strategy, seed, shares, watch.num_oom, regret, truth.near, result.wall_s)


class Watch(Listener):
    """Notes the configs that a search probed before its play-off."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.num_oom = 0

    def on(self, event: Event) -> None:
        if isinstance(event, ProbeEnded) and event.trial.stage != PLAY_OFF:
            self.configs.append(event.trial.config)
            self.num_oom += event.trial.outcome.kind is Kind.OOM


def searches(
    scenarios: Sequence[Scenario], strategies: Sequence[str], num_seeds: int, workers: int, keep: Path | None
) -> list[Search]:
    """Every strategy on every scenario, with every seed. `doubling` draws no lots."""
    jobs = [
        (scenario, strategy, seed)
        for strategy in strategies
        for scenario in scenarios
        for seed in range(1 if strategy == "doubling" else num_seeds)
    ]
    kept = {} if keep is None or not keep.exists() else dict(map(_unpacked, keep.read_text().splitlines()))
    found = {job: kept[job] for job in jobs if job in kept}
    left = [job for job in jobs if job not in found]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, search in zip(left, pool.map(run, *zip(*left, strict=True)), strict=True) if left else ():
            found[job] = search
            if keep is not None:
                with keep.open("a") as file:
                    file.write(_packed(search))
    return [found[job] for job in jobs]


def _packed(search: Search) -> str:
    """One line of JSON."""
    return json.dumps(asdict(search) | {"scenario": [str(search.scenario.path), search.scenario.tight]}) + "\n"


def _unpacked(line: str) -> tuple[tuple[Scenario, str, int], Search]:
    fields = json.loads(line)
    path, tight = fields.pop("scenario")
    search = Search(**fields | {"scenario": Scenario(Path(path), tight), "shares": tuple(fields["shares"])})
    return (search.scenario, search.strategy, search.seed), search


def summary(found: Sequence[Search]) -> list[str]:
    """A Markdown table: one row a scenario and strategy, and a row for all scenarios together."""
    lines = [
        "| table and limit | strategy | probes to within 2 % | never | out of memory (most) | probes | regret (90 %) |",
        "|---|---|---|---|---|---|---|",
    ]
    scenarios = list(dict.fromkeys(search.scenario for search in found))
    groups = [([scenario], scenario.name) for scenario in scenarios] + [(scenarios, "all")]
    for members, name in groups:
        for strategy in dict.fromkeys(search.strategy for search in found):
            mine = [search for search in found if search.scenario in members and search.strategy == strategy]
            lines.append(f"| {name} | `{strategy}` | {' | '.join(_figures(mine))} |")
    return lines


def _figures(mine: Sequence[Search]) -> list[str]:
    near = median(search.probes_until_near for search in mine)
    never = sum(math.isinf(search.probes_until_near) for search in mine) / len(mine)
    oom = [search.num_oom for search in mine]
    regrets = [search.regret for search in mine]
    high = quantiles(regrets, n=10)[-1] if len(regrets) > 1 else regrets[0]
    return [
        "-" if math.isinf(near) else f"{near:g}",
        f"{never:.0%}",
        f"{median(oom):g} ({max(oom)})",
        f"{median(len(search.shares) for search in mine):g}",
        f"{median(regrets):.1%} ({high:.1%})",
    ]


def in_time(found: Sequence[Search]) -> list[str]:
    """A Markdown table of the wide tables' searches: one row a scenario and budget, each figure with its most."""
    lines = [
        "| table and limit | budget | probes | seconds | out of memory | below the table's best | near it | below an hour's answer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    regrets = {(search.scenario, search.strategy, search.seed): search.regret for search in found}
    for scenario in dict.fromkeys(search.scenario for search in found):
        for budget in BUDGETS_S:
            mine = [search for search in found if (search.scenario, search.strategy) == (scenario, budget)]
            behind = [
                1 - (1 - search.regret) / (1 - regrets[scenario, [*BUDGETS_S][-1], search.seed]) for search in mine
            ]
            figures = [
                f"{median(len(search.shares) for search in mine):g}",
                _median_and_most([search.wall_s for search in mine], ".0f"),
                _median_and_most([search.num_oom for search in mine], "g"),
                _median_and_most([search.regret for search in mine], ".1%"),
                f"{sum(1 - search.regret >= search.near for search in mine) / len(mine):.0%}",
                _median_and_most(behind, ".1%"),
            ]
            lines.append(f"| {scenario.name} | {budget} | {' | '.join(figures)} |")
    return lines


def _median_and_most(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({max(values):{form}})"


def plot(found: Sequence[Search]) -> None:
    """Best so far over the optimum against the number of probes: median over seeds and tables, with the middle 80 %."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "autotune"  # the same picture from the same searches
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for strategy in dict.fromkeys(search.strategy for search in found):
        curves = np.array([_padded(search.shares) for search in found if search.strategy == strategy])
        low, middle, high = np.quantile(curves, (0.1, 0.5, 0.9), axis=0)
        (line,) = axes.plot(range(1, MAX_PROBES + 1), middle, label=strategy)
        axes.fill_between(range(1, MAX_PROBES + 1), low, high, alpha=0.12, color=line.get_color(), linewidth=0)
    axes.axhline(NEAR, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel="probes, the baseline's included", ylabel="best feasible config, share of the optimum", ylim=(0.4, 1.01)
    )
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def _padded(shares: Sequence[float]) -> list[float]:
    return [*shares[:MAX_PROBES], *[shares[-1]] * (MAX_PROBES - len(shares))]


def write(name: str, lines: Sequence[str], readme: Path = README) -> None:
    """Put lines between the markers of that name in a README; the studies' by default. Raises SystemExit where it has none."""
    text = readme.read_text()
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if pattern.search(text) is None:
        raise SystemExit(
            f"{readme} has no markers for {name!r}: add <!-- {name} --> and <!-- end of {name} --> where it belongs"
        )
    readme.write_text(pattern.sub(lambda match: match[1] + "\n".join(lines) + "\n" + match[2], text))


def main() -> None:
    """Run, print, and write into the README unless only a part was run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", action="store_true", help="the wide tables within five minutes and an hour")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--tables", nargs="+", type=Path, default=TABLES)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of searches that need not be run again")
    parser.add_argument("--write", action="store_true", help="into the README and the plot")
    options = parser.parse_args()
    tables, strategies = (WIDE_TABLES, [*BUDGETS_S]) if options.wide else (options.tables, options.strategies)
    scenarios = [Scenario(path.absolute(), tight) for path in tables for tight in (False, True)]
    found = searches(scenarios, strategies, options.seeds, options.workers, options.keep)
    lines = [f"{options.seeds} seeds a row.", "", *(in_time(found) if options.wide else summary(found))]
    print("\n".join(lines))
    if options.write:
        write("wide" if options.wide else "searches", lines)
        if not options.wide:
            plot(found)


if __name__ == "__main__":
    main()
