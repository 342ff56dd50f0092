"""What a study that several searches share costs, and what faults do to it: run by `make bench-shared-study`.

A trial in each kind of storage; a hundred controllers at once, which are threads that begin and end trials as searches do, and train
nothing; and each fault of `tests/shared_faults.py`. With `--write` tables go into `studies/README.md`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median, quantiles

from autotune.records.study import Proposal
from autotune.study.reading import load_study
from tests.benchmarks.searches import write
from tests.closed_form import ClosedFormRunner, make_search
from tests.postgres import Server, running_server
from tests.shared_faults import FAULTS, PLENTY

NUM_TRIALS = 60
CONTROLLERS, PROCESSES = 100, 2
PROBE_S, WATCHED_S = 30.0, 90.0


def trial_ms(storage: str, folder: Path) -> list[float]:
    """Milliseconds that each of some trials takes from its beginning to its end, beside its probe."""
    runner = ClosedFormRunner()
    search = make_search(folder, runner, storage=storage)
    took = []
    for config in list(search.history.space)[:NUM_TRIALS]:
        began_s = time.perf_counter()
        if search.store.is_shared:
            search.store.look()
        number = search.store.begin(Proposal(config=config), None, search.history.space)
        assert number is not None
        outcome = runner.outcome_of(config, search.settings)
        search.store.finish(number, outcome, search.history.objective, disturbed=False)
        took.append(1000 * (time.perf_counter() - began_s))
    search.store.close()
    return took


def overhead(server: Server) -> Iterator[str]:
    """A trial in SQLite, on a server and in a journal, with one writer."""
    yield "| storage | ms a trial, median | 95 % below |"
    yield "|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        storages = {
            "SQLite": f"sqlite:///{folder}/one.db",
            "PostgreSQL on the same machine": server.new_database(),
            "journal": f"journal:///{folder}/one.log",
        }
        for name, storage in storages.items():
            took = trial_ms(storage, Path(folder))
            yield f"| {name} | {median(took):.0f} | {quantiles(took, n=20)[-1]:.0f} |"


def control(storage: str, first: int, number: int) -> list[tuple[float, float]]:
    """Let so many controllers begin and end trials for a while. Returns the seconds that each beginning and each end took."""
    with tempfile.TemporaryDirectory() as folder:
        found: list[tuple[float, float]] = []
        runner = ClosedFormRunner()
        searches = [make_search(Path(folder), runner, storage=storage) for _ in range(number)]
        configs = list(searches[0].history.space)
        per_controller = len(configs) // CONTROLLERS
        until_s = time.monotonic() + WATCHED_S

        def run(place: int) -> None:
            search = searches[place]
            own = configs[(first + place) * per_controller :][:per_controller]
            time.sleep(PROBE_S * (place + 0.5) / len(searches))  # as if they had begun at any time
            for config in own:
                began_s = time.monotonic()
                search.store.look()
                number = search.store.begin(Proposal(config=config), None, search.history.space)
                begun_s = time.monotonic()
                assert number is not None
                if begun_s + PROBE_S > until_s:
                    return search.store.fail(number, "the time is up")
                time.sleep(PROBE_S)
                ended_s = time.monotonic()
                search.store.finish(
                    number, runner.outcome_of(config, search.settings), search.history.objective, disturbed=False
                )
                found.append((begun_s - began_s, time.monotonic() - ended_s))
            return None

        threads = [threading.Thread(target=run, args=(place,)) for place in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for search in searches:
            search.store.close()
        return found


def load(server: Server) -> Iterator[str]:
    """What a hundred controllers ask of a server, and how long they wait for it."""
    storage = server.new_database()
    database = storage.rpartition("/")[2]
    share = CONTROLLERS // PROCESSES
    commits = f"SELECT xact_commit FROM pg_stat_database WHERE datname = '{database}'"
    with tempfile.TemporaryDirectory() as folder:
        make_search(Path(folder), ClosedFormRunner(), storage=storage).store.close()
    before, before_s, since_s = server.execute(commits)[0][0], server.processor_s(), time.monotonic()
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(control, storage, place * share, share) for place in range(PROCESSES)]
        found = [one for part in parts for one in part.result()]
    wall_s = time.monotonic() - since_s
    asked = int(str(server.execute(commits)[0][0])) - int(str(before))
    begins, ends = ([1000 * one[place] for one in found] for place in (0, 1))
    read = load_study(storage)
    lost = sum(trial.outcome is None for trial in read.probes)
    yield "| controllers | trials | transactions/s | processors of the server | ms to begin (95 % below) | ms to end (95 % below) | lost |"
    yield "|---|---|---|---|---|---|---|"
    yield (
        f"| {CONTROLLERS} | {len(read.probes)} | {asked / wall_s:.0f} | {(server.processor_s() - before_s) / wall_s:.2f} | "
        f"{median(begins):.0f} ({quantiles(begins, n=20)[-1]:.0f}) | {median(ends):.0f} ({quantiles(ends, n=20)[-1]:.0f}) | "
        f"{len(found) - len(read.probes) + lost} |"
    )


def faults(server: Server) -> Iterator[str]:
    """Each fault, with the heartbeats of a real search."""
    yield "| what happens | trials lost that had ended | trials without an outcome | s until it goes on | left behind | answers |"
    yield "|---|---|---|---|---|---|"
    for fault, words in FAULTS.items():
        found = fault(server, beat_s=5, gone_after_s=30, budget_s=600.0, num_trials=3 * int(str(PLENTY["num_trials"])))
        yield (
            f"| {words} | {found.lost} | {found.interrupted} | {found.goes_on_s:.1f} | {found.left or 'nothing'} | {found.answers} |"
        )


def main() -> None:
    """Measure, print, and write into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"storages": overhead, "controllers": load, "faults": faults}
    parser.add_argument("--only", choices=parts, nargs="+", default=[*parts])
    parser.add_argument("--write", action="store_true", help="into the README")
    options = parser.parse_args()
    for name in options.only:
        with running_server(durable=True) as server:
            lines = []
            for line in parts[name](server):
                print(line, flush=True)
                lines.append(line)
        if options.write:
            write(f"shared {name}", lines)


if __name__ == "__main__":
    main()
