"""What may go wrong while several searches share a study on a server, each fault for real; and what came of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.records.study import DECIDING
from autotune.study.reading import Study, load_study
from autotune.study.storage import connect
from tests.controllers import USUAL, Controller, controllers
from tests.postgres import Network, Server

# enough trials that no search is done before those that waited longer for the storage are back
PLENTY = {"sampler": "random", "seconds": 0.4, "num_trials": 12, "budget_s": 300.0}
LONGEST_S = 120.0
LIVING = {"gone_after_s": 30}  # no search dies: one that a busy machine stops for seconds must not count as dead
FULL_BYTES = 24 * 2**20


@dataclass(frozen=True)
class Aftermath:
    """What came of a fault.

    Attributes:
        lost: trials that had ended before it and are not there any more.
        repeated: configs outside the play-off that were measured twice.
        interrupted: trials without an outcome.
        goes_on_s: seconds from the end of the fault until another trial has ended, or from a search's death until what it held is free.
        left: trials, processes of searches and connections to the server that are left in the end.
        answers: how many different answers the searches left with.
        notes: what the searches told.
    """

    lost: int
    repeated: int
    interrupted: int
    goes_on_s: float
    left: int
    answers: int
    notes: tuple[str, ...]


def restart(server: Server, **asked: Any) -> Aftermath:
    """The server is restarted in the middle: its connections are cut."""

    def fault(running: list[Controller], url: str) -> Callable[[], bool]:
        server.stop(signal.SIGINT)
        server.start()
        return _another_has_ended(url)

    return _endure(server, fault, **{**LIVING, **asked})


def kill_server(server: Server, **asked: Any) -> Aftermath:
    """The server is killed in the middle, and started again."""

    def fault(running: list[Controller], url: str) -> Callable[[], bool]:
        server.stop(signal.SIGKILL)
        server.start()
        return _another_has_ended(url)

    return _endure(server, fault, **{**LIVING, **asked})


def cut_network(server: Server, for_s: float = 10.0, **asked: Any) -> Aftermath:
    """The network between all searches and the server goes away for some seconds."""
    network = Network(server.port)

    def fault(running: list[Controller], url: str) -> Callable[[], bool]:
        network.go_away(for_s)
        return _another_has_ended(url)

    try:
        return _endure(server, fault, port=network.port, **asked)
    finally:
        network.close()


def fill_disk(server: Server, for_s: float = 5.0, **asked: Any) -> Aftermath:
    """The disk of the studies is full, until so many seconds after the server has found that out."""
    with _small_disk(server) as folder:

        def fault(running: list[Controller], url: str) -> Callable[[], bool]:
            with (folder / "other").open("wb") as other:
                while True:
                    try:
                        other.write(b"x" * 2**16)
                        other.flush()
                    except OSError:
                        break
            _wait_until(lambda: "No space left on device" in (server.folder / "server.log").read_text())
            time.sleep(for_s)
            os.truncate(folder / "other", 0)
            return _another_has_ended(url)

        return _endure(server, fault, tablespace="small", **asked)


def kill_in_a_probe(server: Server, **asked: Any) -> Aftermath:
    """A search is killed while it holds a trial, on another machine as far as the others can see."""

    def fault(running: list[Controller], url: str) -> Callable[[], bool]:
        dead = running.pop()
        pid = dead.process.pid
        dead.until("begins")
        dead.go()
        _wait_until(lambda: any(_owner(trial) == pid for trial in _running(url)))
        dead.kill()
        return lambda: not any(_owner(trial) == pid for trial in _running(url))

    # the others run on for twice as long as it takes until they know
    probe_s = asked.get("gone_after_s", USUAL["gone_after_s"]) / 5
    lasting = {"seconds": [probe_s, probe_s, LONGEST_S], "num_trials": 12, "waits": [False, False, True]}
    return _endure(server, fault, elsewhere=True, **{**asked, **lasting})


def kill_in_the_play_off(server: Server, **asked: Any) -> Aftermath:
    """The search that holds the play-off is killed in it."""

    def fault(running: list[Controller], url: str) -> Callable[[], bool]:
        pid = 0
        while not pid:
            pid = next((_owner(one) for one in _running(url) if one.get("stage") == DECIDING), 0)
        dead = next(one for one in running if one.process.pid == pid)
        running.remove(dead)
        dead.until("started", stage="play-off")
        dead.kill()
        return lambda: any(_owner(one) != pid for one in _running(url) if one.get("stage") == DECIDING)

    return _endure(server, fault, elsewhere=True, **{**asked, "num_trials": 3})


def begin_together(server: Server, **asked: Any) -> Aftermath:
    """Two searches begin in an empty database at the same instant."""

    def fault(running: list[Controller], url: str) -> Callable[[], bool]:
        return _another_has_ended(url)

    return _endure(server, fault, number=2, begun=0, waits=True, **asked)


def set_a_clock_ahead(server: Server, **asked: Any) -> Aftermath:
    """The clock of one search's machine is an hour ahead, in another time zone."""

    def fault(running: list[Controller], url: str) -> Callable[[], bool]:
        running[0].until("started")
        return _another_has_ended(url)

    zones = [{"PGTZ": "Asia/Tokyo"}, {"PGTZ": "America/Lima"}]
    return _endure(server, fault, number=2, ahead_s=[3600.0, 0.0], environment=zones, elsewhere=True, **asked)


def _endure(
    server: Server,
    fault: Callable[[list[Controller], str], Callable[[], bool]],
    *,
    number: int = 3,
    begun: int = 3,
    port: int | None = None,
    tablespace: str = "",
    **asked: Any,
) -> Aftermath:
    """Let so many searches share a study, and something go wrong once they have ended some trials.

    Args:
        fault: lets it go wrong, takes the searches that it kills out of the list, and returns whether all goes on by now.
    """
    url = server.new_database(tablespace)
    database = url.rpartition("/")[2]
    with controllers(number, server.url(database, port), **{**PLENTY, **asked}) as all_of_them:
        running = [*all_of_them]
        if asked.get("waits") is True:
            for one in running:
                one.until("begins")
            for one in running:
                one.go()
        _wait_until(lambda: len(_ended(url)) >= begun)
        before = _ended(url)
        goes_on = fault(running, url)
        since_s = time.monotonic()
        _wait_until(goes_on)
        goes_on_s = time.monotonic() - since_s
        answers = [one.result() for one in running]
        notes = tuple(note for one in all_of_them for note in one.notes())
    read = load_study(url)
    probed = [probe.config for probe in read.probes if not probe.in_play_off]
    connections = server.execute(f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}'")[0][0]
    left = sum(one.process.poll() is None for one in all_of_them)
    return Aftermath(
        lost=len(before - {probe.number for probe in read.probes}),
        repeated=len(probed) - len(set(probed)),
        interrupted=read.num_lost,
        goes_on_s=goes_on_s,
        left=left + int(str(connections)) + read.num_running,
        answers=len({str(answer["config"]) for answer in answers}),
        notes=notes,
    )


def _wait_until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < until_s, "it does not go on"
        time.sleep(0.05)


def _read(url: str) -> Study | None:
    """The study, where there is one by now."""
    from autotune.errors import StudyError

    try:
        return load_study(url)
    except StudyError:
        return None


def _ended(url: str) -> set[int]:
    read = _read(url)
    return {probe.number for probe in read.probes} if read is not None else set()


def _another_has_ended(url: str) -> Callable[[], bool]:
    before = len(_ended(url))
    return lambda: len(_ended(url)) > before


def _running(url: str) -> list[dict[str, Any]]:
    """The attributes of the trials that are marked as running."""
    storage = connect(url, must_exist=True)
    studies = [study._study_id for study in storage.get_all_studies()]
    trials = [trial for study in studies for trial in storage.get_all_trials(study) if trial.state.name == "RUNNING"]
    storage.engine.dispose()
    return [trial.user_attrs for trial in trials]


def _owner(attributes: dict[str, Any]) -> int:
    return int(attributes["owner"]["pid"])


def may_mount() -> bool:
    """Whether a small disk can be made here."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def _small_disk(server: Server) -> Iterator[Path]:
    """A disk of some MiB, in which the tablespace `small` lies."""
    folder = server.folder / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        space = folder / "tables"
        space.mkdir()
        shutil.chown(space, server.folder.owner())
        server.execute(f"CREATE TABLESPACE small LOCATION '{space}'")
        yield folder
        for (name,) in server.execute(
            "SELECT datname FROM pg_database JOIN pg_tablespace s ON dattablespace = s.oid WHERE spcname = 'small'"
        ):
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")
        server.execute("DROP TABLESPACE small")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


FAULTS: dict[Callable[..., Aftermath], str] = {
    restart: "the server is restarted",
    kill_server: "the server is killed, and started again",
    fill_disk: "the server's disk is full for 5 s",
    cut_network: "the network is gone for 10 s",
    kill_in_a_probe: "a search is killed in a probe",
    kill_in_the_play_off: "a search is killed in the play-off",
    begin_together: "two searches begin at the same instant",
    set_a_clock_ahead: "a clock is an hour ahead",
}
