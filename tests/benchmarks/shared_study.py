"""What a study that several searches share costs, and what faults do to it: run by `make bench-shared-study`.

A trial in each kind of storage; up to a hundred controllers at once, which are threads that begin and end trials, or wait for a play-off,
as searches do, and train nothing; and each fault of `tests/shared_faults.py`. With `--write` tables go into `studies/README.md`. Faults
that were not staged keep their rows there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median, quantiles

from sqlalchemy import Engine, event

from autotune.records.config import Config
from autotune.records.study import Proposal
from autotune.study.reading import load_study
from autotune.tuning.budget import OVERRUN
from autotune.tuning.state import Search
from autotune.tuning.together import hold_play_off
from tests.benchmarks.searches import README, write
from tests.closed_form import ClosedFormRunner, make_search
from tests.postgres import Server, running_server
from tests.shared_faults import FAULTS, PLENTY

NUM_TRIALS = 60
PROCESSES = 2  # that play the controllers
PROBE_S, WATCHED_S = 20.0, 50.0
SLOWEST_OPENING_S = 120.0  # of all searches
OFTEN_S = 1.0  # between two counts of connections

opened: Barrier  # of each process: all have opened their searches


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


@dataclass(frozen=True)
class Part:
    """What the controllers of one process have seen.

    Attributes:
        claims_ms: milliseconds that each beginning of a trial took, its look at the study included.
        refused: beginnings that failed because another controller was faster.
        ends_ms: milliseconds that each end took.
        num_statements: statements that they sent.
        processor_s: of the process.
    """

    claims_ms: list[float]
    refused: int
    ends_ms: list[float]
    num_statements: int
    processor_s: float


def meet_at(barrier: Barrier) -> None:
    """Let the processes begin at once, when all of them have opened their searches."""
    global opened
    opened = barrier


def control(storage: str, seed: int, number: int, *, waits: bool) -> Part:
    """Let so many controllers, each a thread, share a study for a while. All of them want the same configs in the same order.

    Args:
        waits: whether they wait for a play-off that another holds, and probe nothing.
    """
    statements: list[None] = []  # appended to by all threads
    claims_ms: list[float] = []
    ends_ms: list[float] = []
    refused: list[None] = []
    with tempfile.TemporaryDirectory() as folder:
        runner = ClosedFormRunner()
        searches = [
            make_search(Path(folder), runner, storage=storage, budget_s=WATCHED_S / OVERRUN) for _ in range(number)
        ]
        event.listen(Engine, "before_cursor_execute", lambda *args: statements.append(None))
        opened.wait(SLOWEST_OPENING_S)
        statements.clear()
        until_s, processor_s = time.monotonic() + WATCHED_S, time.process_time()

        def claim(search: Search) -> tuple[Config, int] | None:
            while time.monotonic() < until_s:
                search.catch_up()
                history = search.history
                taken = history.in_flight | history.known.keys()
                left = (one for one in history.space if one not in taken)
                if (config := next(left, None)) is None:
                    return None
                if (trial := search.store.begin(Proposal(config=config), None, history.space, num_known=0)) is not None:
                    return config, trial
                refused.append(None)
            return None

        def explore(place: int, search: Search) -> None:
            time.sleep(PROBE_S * (place + seed / PROCESSES) / number)  # as if they had begun at any time
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                if (claimed := claim(search)) is None:
                    return
                claims_ms.append(1000 * (time.monotonic() - began_s))
                config, trial = claimed
                time.sleep(max(0.0, min(PROBE_S, until_s - time.monotonic())))
                ended_s = time.monotonic()
                outcome = runner.outcome_of(config, search.settings)
                search.store.finish(trial, outcome, search.history.objective, disturbed=False)
                ends_ms.append(1000 * (time.monotonic() - ended_s))

        def wait(place: int, search: Search) -> None:
            hold_play_off(search)

        act = wait if waits else explore
        threads = [threading.Thread(target=act, args=one) for one in enumerate(searches)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        processor_s = time.process_time() - processor_s
        num_statements = len(statements)
        for search in searches:
            search.store.close()
    return Part(claims_ms, len(refused), ends_ms, num_statements, processor_s)


def load(server: Server) -> Iterator[str]:
    """What controllers ask of a server, how long they wait for it, and whether a config ran twice."""
    yield (
        "| controllers | trials | run twice | lost | statements/s | processors of the server | of each controller | "
        "connections | ms to begin (95 % below) | another was faster | ms to end (95 % below) |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for number, waits in ((10, False), (100, False), (100, True)):
        storage = server.new_database()
        with tempfile.TemporaryDirectory() as folder:
            first = make_search(Path(folder), ClosedFormRunner(), storage=storage)
            if waits:
                first.store.take_play_off()
            spawned, share = multiprocessing.get_context("spawn"), number // PROCESSES
            all_open = spawned.Barrier(PROCESSES + 1)
            with ProcessPoolExecutor(PROCESSES, spawned, meet_at, (all_open,)) as pool:
                running = [pool.submit(control, storage, seed, share, waits=waits) for seed in range(PROCESSES)]
                all_open.wait(SLOWEST_OPENING_S)
                before_s, since_s = server.processor_s(), time.monotonic()
                with counting_connections(server) as connections:
                    parts = [one.result() for one in running]
                wall_s, used_s = time.monotonic() - since_s, server.processor_s() - before_s
            first.store.leave_play_off()
            first.store.close()
        read = load_study(storage)
        claims, ends = ([ms for part in parts for ms in getattr(part, name)] for name in ("claims_ms", "ends_ms"))
        probed = [trial.config for trial in read.probes]
        statements = sum(part.num_statements for part in parts)
        own = sum(part.processor_s for part in parts) / number / wall_s
        yield (
            f"| {number}{', which wait for the play-off' if waits else ''} | {len(probed)} | {len(probed) - len({*probed})} | "
            f"{len(ends) - len(probed) + read.num_lost} | {statements / wall_s:.0f} | {used_s / wall_s:.2f} | "
            f"{own:.3f} | {max(connections)} | {_told_ms(claims)} | {sum(part.refused for part in parts)} | {_told_ms(ends)} |"
        )


@contextmanager
def counting_connections(server: Server) -> Iterator[list[int]]:
    """How many connections to its databases a server has, again and again; those that count are left out."""
    found: list[int] = []
    ended = threading.Event()

    def count() -> None:
        while not ended.wait(OFTEN_S):
            rows = server.execute("SELECT count(*) FROM pg_stat_activity WHERE datname LIKE 'studies%'")
            found.append(int(str(rows[0][0])))

    thread = threading.Thread(target=count)
    thread.start()
    yield found
    ended.set()
    thread.join()


def _told_ms(took: list[float]) -> str:
    return f"{median(took):.0f} ({quantiles(took, n=20)[-1]:.0f})" if took else ""


def faults(server: Server, names: Collection[str]) -> Iterator[str]:
    """Each fault of these names, with the heartbeats of a real search."""
    yield "| what happens | trials lost that had ended | trials without an outcome | s until it goes on | left behind | answers |"
    yield "|---|---|---|---|---|---|"
    for fault, words in FAULTS.items():
        if fault.__name__ not in names:
            continue
        found = fault(server, beat_s=5, gone_after_s=30, budget_s=600.0, num_trials=3 * int(str(PLENTY["num_trials"])))
        yield (
            f"| {words} | {found.lost} | {found.interrupted} | {found.goes_on_s:.1f} | {found.left or 'nothing'} | {found.answers} |"
        )


def with_other_faults(lines: Sequence[str]) -> list[str]:
    """The table of faults, with the README's rows of those that were not staged."""
    table = re.search(r"<!-- shared faults -->\n(.*?)<!-- end", README.read_text(), re.DOTALL)
    assert table is not None
    head, rows = lines[:2], [*table[1].splitlines()[2:], *lines[2:]]
    by_words = {row.split(" | ")[0].removeprefix("| "): row for row in rows}
    return [*head, *(by_words[words] for words in FAULTS.values() if words in by_words)]


def main() -> None:
    """Measure, print, and write into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [fault.__name__ for fault in FAULTS]
    parser.add_argument("--faults", choices=names, nargs="+", default=names, help="which ones are staged")
    parser.add_argument("--only", choices=("storages", "controllers", "faults"), nargs="+")
    parser.add_argument("--write", action="store_true", help="into the README")
    options = parser.parse_args()
    parts = {"storages": overhead, "controllers": load, "faults": partial(faults, names=options.faults)}
    for name in options.only or parts:
        with running_server(durable=True) as server:
            lines = []
            for line in parts[name](server):
                print(line, flush=True)
                lines.append(line)
        if options.write:
            write(f"shared {name}", with_other_faults(lines) if name == "faults" else lines)


if __name__ == "__main__":
    main()
