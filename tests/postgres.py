"""A PostgreSQL server for the tests: on the loopback address, in a temporary folder, as a user of its own; and a network that goes away."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import find_children

PASSWORD = "not-to-be-seen"
HOW = "needs PostgreSQL and its driver: apt-get install postgresql, pip install 'autotune-torch[postgres]'"
SLOWEST_START_S = 60


def _program(name: str) -> str | None:
    """A program of the server's; Debian keeps them away from the path."""
    found = [*Path("/usr/lib/postgresql").glob(f"*/bin/{name}")]
    return shutil.which(name) or (str(max(found)) if found else None)


def why_none() -> str:
    """Why there can be no server here; empty where there can."""
    if importlib.util.find_spec("psycopg") is None or _program("initdb") is None or _program("postgres") is None:
        return HOW
    if os.getuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return HOW
    return ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Server:
    """A server whose user `tester` has a password.

    Args:
        folder: for its data.
        durable: whether a commit waits for the disk, as on a server that is used.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        self.folder, self.port, self._fsync = folder, free_port(), "on" if durable else "off"
        self._as_user: list[str] = []
        if os.getuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
            self._as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        initdb = [str(_program("initdb")), "-D", str(folder / "data"), "-U", "tester", "-A", "scram-sha-256"]
        self._run([*initdb, "--no-sync", f"--pwfile={secret}", "--locale=C", "-E", "UTF8"])
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def _run(self, command: list[str]) -> None:
        subprocess.run([*self._as_user, *command], check=True, capture_output=True, cwd=self.folder)

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        settings = {
            "port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": self._fsync,
            "max_connections": 300, "shared_buffers": "32MB", "logging_collector": "off",
        }  # fmt: skip
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        ends_with_us = ["setpriv", "--pdeathsig=QUIT"]
        command = [*self._as_user, *ends_with_us, str(_program("postgres")), "-D", str(self.folder / "data"), *options]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        until_s = time.monotonic() + SLOWEST_START_S
        while not self._answers():
            assert time.monotonic() < until_s, (self.folder / "server.log").read_text()
            if self._process.poll() is not None:  # one that was killed may have processes yet that hold its memory
                self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(0.2)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url("postgres").replace("+psycopg", ""), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT cuts its connections and shuts down, SIGQUIT leaves everything as it is, as a crash does."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait()

    def processor_s(self) -> float:
        """Seconds of processors that the server has used, those of its processes that have ended included."""
        assert self._process is not None
        times = psutil.Process(self._process.pid).cpu_times()
        running = []
        for one in find_children(psutil.Process(self._process.pid), recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                running.append(one.cpu_times())
        ended_s: float = times.children_user + times.children_system
        return ended_s + sum(one.user + one.system for one in (times, *running))

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement outside any transaction."""
        import psycopg

        with psycopg.connect(self.url(database).replace("+psycopg", ""), autocommit=True) as connection:
            found = connection.execute(statement)  # type: ignore[arg-type]
            return found.fetchall() if found.description else []

    def new_database(self, tablespace: str = "") -> str:
        """The URL of an empty database."""
        name = f"studies_{time.monotonic_ns()}"
        self.execute(f"CREATE DATABASE {name}" + (f" TABLESPACE {tablespace}" if tablespace else ""))
        return self.url(name)

    def url(self, database: str, port: int | None = None) -> str:
        return f"postgresql+psycopg://tester:{PASSWORD}@127.0.0.1:{port or self.port}/{database}"


@contextlib.contextmanager
def running_server(*, durable: bool = False) -> Iterator[Server]:
    """A server that is gone afterwards, data and all."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-postgres-"))  # pytest's own folders are closed to other users
    server = None
    try:
        server = Server(folder, durable=durable)
        yield server
    finally:
        if server is not None:
            server.stop(signal.SIGQUIT)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    if reason := why_none():
        pytest.skip(reason)
    with running_server() as found:
        yield found


@pytest.fixture
def database(server: Server) -> str:
    """The URL of an empty database, with its password."""
    return server.new_database()


class Network:
    """A relay to a port of this machine, whose connections may be cut, and refused for a while."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._is_gone = threading.Event()
        self._ended = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._listen, daemon=True).start()

    def go_away(self, for_s: float) -> None:
        """Cut all connections, and take none for so many seconds."""
        self._is_gone.set()
        time.sleep(for_s)
        self._is_gone.clear()

    def close(self) -> None:
        self._ended.set()
        self._is_gone.set()
        self._server.close()

    def _listen(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError):
                near, _ = self._server.accept()
                threading.Thread(target=self._relay, args=(near,), daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as far:
            other = {near: far, far: near}
            while not self._is_gone.is_set():
                for ready in select.select([near, far], [], [], 0.05)[0]:
                    if not (data := ready.recv(2**16)):
                        return
                    other[ready].sendall(data)
