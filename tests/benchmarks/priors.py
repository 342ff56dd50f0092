"""What earlier studies are worth to a search, over recorded tables: run by `make bench-priors`.

One search over each table leaves what it found, and further searches over the other tables begin with it. Each ends as soon as it has
probed a config near the table's best, since the probes until then are what is compared; the play-off knows nothing of priors. What a
search is given:

- `nothing`;
- `again`: the study of this very table, whose repeats were drawn in another order, as after an update that changes nothing;
- `like`: studies of the same task: on other processors, or, for `gpt`, of another vocabulary, context and global batch;
- `all`: the studies of all other tables, each counting by its own likeness;
- `other`: the study of another kind of model, which claims to be of this one on this machine;
- `false`: this table's own study turned upside down (each speed inverted, the slowest config for its answer), with the same claim;
- `near`, with `--near`: what a live search of 45 s left of the same model, with 4 to 16 times the global batch (`bench-heavy`). Tables of
  their own were recorded for it (`*.keep_heap.csv`), on a processor like that of these searches, with all techniques that they tried.

The first probe is the baseline's and the second is the first that can be better, so 2 is the least where the baseline is not near.
With `--write` the table goes into `studies/README.md`; with `--keep FILE` what that file holds is not run again, and the rest is added.
`--heavy FOLDER` takes what a `bench-heavy --keep FOLDER` has left in place of what `near` was given before.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from autotune.proposers.base import Proposer
from autotune.records.options import SearchOptions
from autotune.records.priors import PriorStudy, PriorTrial
from autotune.records.study import Proposal
from autotune.runners.replay import ReplayRunner
from autotune.study.history import History
from autotune.study.priors import PriorStore
from autotune.tuning.events import Listener
from autotune.tuning.explore import explore, measure_baseline, undo_changes
from autotune.tuning.opening import open_search
from autotune.tuning.search import search as run_search
from tests.benchmarks.first_contact import GRIDS, PROFILES, UNSEEN, unseen_tables
from tests.benchmarks.kept import Kept
from tests.benchmarks.memory import TABLES, WIDE_TABLES
from tests.benchmarks.searches import HEADROOM, MAX_PROBES, Scenario, Truth, Watch, write

GIVEN = ("nothing", "again", "like", "all", "other", "false")
GIVEN_NEAR = ("nothing", "again", "near")
LEAST = 2  # probes: the baseline's and one that is better
NEAR = Path(__file__).parent / "priors_near.jsonl"  # a study a line
NEAR_TABLES = sorted(UNSEEN.glob("*/*.keep_heap.csv"))
LEFT_BY_SEED = 1000  # of the searches that leave something: none of those that begin with it
EMULATES_BF16 = {"avx2", "avx512_core"}  # processors on which a search leaves it out, though some tables hold it
OTHERS = {"gpt": "digits", "digits": "tagger", "tagger": "digits"}  # another kind of model, for `other`


class Given(PriorStore):
    """A store that holds what it is given, and keeps nothing."""

    def __init__(self, studies: Sequence[PriorStudy]) -> None:
        super().__init__(Path())
        self._studies = list(studies)

    def studies(self) -> list[PriorStudy]:
        return self._studies

    def keep(self, study: PriorStudy) -> None:
        pass


@dataclass(frozen=True)
class UntilNear:
    """Another proposer's proposals, until a config near the table's best was probed."""

    proposer: Proposer
    truth: Truth
    watch: Watch

    def propose(self, history: History) -> Proposal | None:
        """The next, unless there is one near the best."""
        if self.watch.configs and self.truth.shares(self.watch.configs)[-1] >= self.truth.near:
            return None
        return self.proposer.propose(history)


def options_for(truth: Truth, seed: int) -> SearchOptions:
    """Of a search that only its number of probes ends."""
    return SearchOptions(
        budget_s=1e6,
        num_trials=MAX_PROBES,
        memory_limit_bytes=truth.limit_bytes,
        headroom=HEADROOM,
        seed=seed,
        storage="sqlite:///:memory:",
        exclude=("amp",) if truth.scenario.path.stem in EMULATES_BF16 else (),
    )


def left_by(path: Path) -> PriorStudy:
    """What one whole search over a table leaves."""
    truth = Truth(Scenario(path, tight=False))
    with tempfile.TemporaryDirectory() as folder:
        store = PriorStore(Path(folder))
        runner = ReplayRunner(truth.table, seed=LEFT_BY_SEED)
        run_search(None, options_for(truth, LEFT_BY_SEED), runner=runner, listener=Listener(), priors=store)
        (found,) = store.studies()
        return found


def probes_until_near(scenario: Scenario, given: Sequence[PriorStudy], seed: int) -> float:
    """Probes of a search, the baseline's included, until one is near the table's best; endless where none is."""
    truth, watch = Truth(scenario), Watch()
    runner = ReplayRunner(truth.table, seed=seed)
    with open_search(None, options_for(truth, seed), runner, watch, priors=Given(given)) as search:
        measure_baseline(search)
        explore(search, UntilNear(search.proposer(), truth, watch))
        if truth.shares(watch.configs)[-1] < truth.near:
            undo_changes(search)
    return next((n for n, share in enumerate(truth.shares(watch.configs), start=1) if share >= truth.near), math.inf)


def all_left(paths: Sequence[Path], pool: ProcessPoolExecutor, kept: Kept) -> dict[Path, PriorStudy]:
    """What searches over all tables leave."""
    found = kept.each({f"left by {path}": (path,) for path in paths}, _left_by, pool)
    return dict(zip(paths, map(PriorStudy.from_dict, found.values()), strict=True))


def _left_by(path: Path) -> dict[str, Any]:
    return left_by(path).to_dict()


def all_probes(
    jobs: Mapping[tuple[Scenario, str, int], Sequence[PriorStudy]], pool: ProcessPoolExecutor, kept: Kept
) -> dict[tuple[Scenario, str, int], float]:
    """Probes until near of every search: a scenario, the name of what it is given, and a seed, with the studies that are that."""
    asked = {
        f"{scenario.path} {scenario.tight} {name} {seed}": (scenario, given, seed)
        for (scenario, name, seed), given in jobs.items()
    }
    return dict(zip(jobs, kept.each(asked, probes_until_near, pool).values(), strict=True))


def given_to(path: Path, left: dict[Path, PriorStudy]) -> dict[str, list[PriorStudy]]:
    """What searches over a table are given, by name."""
    own, task = left[path], path.parent.name
    others = {other: _of_processor(other, study) for other, study in left.items() if other != path}
    another = next(s for p, s in others.items() if p.parent.name == OTHERS.get(task, "gpt"))
    return _nothing_or_again(own) | {
        "like": [study for other, study in others.items() if other.parent.name == task],
        "all": [*others.values()],
        "other": [replace(another, name="other", circumstances=own.circumstances)],
        "false": [replace(_upside_down(own), name="false")],
    }


def given_with_near(path: Path, left: dict[Path, PriorStudy]) -> dict[str, list[PriorStudy]]:
    """What searches over a table of `NEAR_TABLES` are given, by name."""
    own, task = left[path], path.parent.name
    studies = map(PriorStudy.from_dict, map(json.loads, NEAR.read_text().splitlines()))
    return _nothing_or_again(own) | {"near": [_of_machine(own, study) for study in studies if _task_of(study) == task]}


def _nothing_or_again(own: PriorStudy) -> dict[str, list[PriorStudy]]:
    return {"nothing": [], "again": [replace(own, name="again")]}


def _task_of(study: PriorStudy) -> str:
    return study.name.split()[0]


def _of_machine(own: PriorStudy, study: PriorStudy) -> PriorStudy:
    """The study as one of the machine and versions on which a table is replayed."""
    here = own.circumstances
    there = replace(study.circumstances, device=here.device, environment=here.environment, torch=here.torch)
    return replace(study, circumstances=there)


def _of_processor(path: Path, study: PriorStudy) -> PriorStudy:
    """The study as one of the processor that its table was recorded on: a replay takes all tables for this machine's."""
    if path.stem not in PROFILES:
        return study
    environment = {"ONEDNN_MAX_CPU_ISA": path.stem.upper()}
    return replace(study, circumstances=replace(study.circumstances, environment=environment))


def _upside_down(study: PriorStudy) -> PriorStudy:
    trials = tuple(map(_inverted, study.trials))
    slowest = max(trials, key=lambda trial: trial.speed)
    return replace(study, trials=trials, answer=slowest.config)


def _inverted(trial: PriorTrial) -> PriorTrial:
    if not trial.speed:
        return trial
    return replace(
        trial, speed=1 / trial.speed, speed_low=1 / trial.speed_high, speed_high=1 / trial.speed_low, phases={}
    )


def summary(found: dict[tuple[Scenario, str, int], float], names: Sequence[str]) -> list[str]:
    """A Markdown table: one row a table and limit, and one for all; medians, and in brackets the 90 % quantile."""
    lines = [f"| table and limit | {' | '.join(f'`{name}`' for name in names)} |", f"|---|{'---|' * len(names)}"]
    scenarios = list(dict.fromkeys(scenario for scenario, _, _ in found))
    groups = [([one], one.name) for one in scenarios] + [(scenarios, "all")]
    for members, label in groups:
        cells = []
        for name in names:
            mine = [probes for (one, given, _), probes in found.items() if one in members and given == name]
            cells.append(_median_and_most(mine) if mine else "")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    lines += ["", *_worse(found, names)]
    if "near" in names:
        lines += ["", _halved(found)]
    return lines


def _halved(found: dict[tuple[Scenario, str, int], float]) -> str:
    """What like studies save where there is something to save."""
    every = _beside_nothing(found, "near")
    pairs = [pair for pair in every if pair[1] > LEAST]
    if not pairs:
        return f"None of {len(every)} searches takes more than {LEAST} probes with nothing."
    given, without = zip(*pairs, strict=True)
    return (
        f"Of {len(every)} searches {len(given)} take more than {LEAST} probes with nothing: {median(without):g} in the median, and "
        f"{median(given):g} with `near`; the baseline's left out, {median(without) - 1:g} and {median(given) - 1:g}."
    )


def _median_and_most(probes: Sequence[float]) -> str:
    capped = [min(one, MAX_PROBES) for one in probes]
    high = quantiles(capped, n=10, method="inclusive")[-1] if len(capped) > 1 else capped[0]
    never = sum(map(math.isinf, probes))
    return f"{median(capped):g} ({high:.3g})" + (f", never {never}" if never else "")


def _beside_nothing(found: dict[tuple[Scenario, str, int], float], name: str) -> list[tuple[float, float]]:
    """The probes of each search that was given something, and of the same one with nothing."""
    return [
        (min(probes, MAX_PROBES), min(found[scenario, "nothing", seed], MAX_PROBES))
        for (scenario, given, seed), probes in found.items()
        if given == name
    ]


def _worse(found: dict[tuple[Scenario, str, int], float], names: Sequence[str]) -> list[str]:
    """Of the searches that were given something: how many took fewer, as many, and more probes than with nothing."""
    lines = [
        "| given | fewer probes | as many | one more | two or more more | most more |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        if name != "nothing" and (pairs := _beside_nothing(found, name)):
            more = [probes - without for probes, without in pairs]
            counts = [sum(m < 0 for m in more), more.count(0), more.count(1), sum(m > 1 for m in more)]
            lines.append(f"| `{name}` | {' | '.join(f'{n / len(more):.0%}' for n in counts)} | {max(more):g} |")
    return lines


def main() -> None:
    """Run, print, and write into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--given", nargs="+", default=list(GIVEN), choices=GIVEN)
    parser.add_argument("--near", action="store_true", help="what like studies of another size are worth")
    parser.add_argument("--heavy", type=Path, help="folder of `bench-heavy --keep`: its studies are `near` from now on")
    parser.add_argument("--tables", nargs="+", type=Path, help="default: all that are recorded")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="file of what need not be run again")
    parser.add_argument("--write", action="store_true", help="into the studies' README")
    options = parser.parse_args()
    if options.heavy is not None:
        studies = sorted(PriorStore(options.heavy).studies(), key=lambda study: study.name)
        NEAR.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in studies if _task_of(one) in GRIDS))
    tables, choose = (*TABLES, *WIDE_TABLES, *unseen_tables()), given_to
    if options.near:
        options.given, tables, choose = list(GIVEN_NEAR), (*NEAR_TABLES,), given_with_near
    every = [path.absolute() for path in tables]
    wanted = [path.absolute() for path in options.tables] if options.tables else every
    kept = Kept(options.keep)
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        left = all_left(every, pool, kept)
        given = {path: choose(path, left) for path in wanted}
        jobs = {
            (Scenario(path, tight), name, seed): given[path][name]
            for seed in range(options.seeds)
            for path in wanted
            for tight in (False, True)
            for name in options.given
            if name == "nothing" or given[path][name]
        }
        found = all_probes(jobs, pool, kept)
    lines = [f"{options.seeds} seeds a row.", "", *summary(found, options.given)]
    print("\n".join(lines))
    if options.write:
        write("priors near" if options.near else "priors", lines)


if __name__ == "__main__":
    main()
