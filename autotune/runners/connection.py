"""The search's end of the line to a supervisor process (`autotune.runners.supervisor`): start it, talk to it, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from autotune.devices.cpu import THREAD_VARIABLES, num_threads
from autotune.devices.linux import cores
from autotune.errors import StudyError, TaskError, describe_exit
from autotune.runners.runner import ProbeFault
from autotune.runners.start import BLAS_THREADS, Started, quiet, take
from autotune.task.source import TaskSource
from autotune.units import format_seconds

STOP_TIMEOUT_S = 10.0


class Connection:
    """A supervisor that has imported the task's module, and the socket to it.

    Args:
        source: how the supervisor gets the task; None where a command trains, and there is none.
        log: receives what the import prints.
        import_timeout_s: for importing torch and the user's module.
        folder: of the search, which goes with it if it dies.
        fork: False starts a new interpreter for each job.
        num_ranks: of the worlds that are probed.
        processors: numbers of those that everything behind it runs on; None for all that this process may use.

    Attributes:
        hello: what the supervisor says of the task: in `stated` what its author does (a `Stated`), where there is a task, and in
            `no_fork` why every job has to start a new interpreter, empty when none has to.

    Raises:
        TaskError: the user's module cannot be imported.
        StudyError: the log cannot be written.
    """

    def __init__(
        self,
        source: TaskSource | None,
        *,
        log: Path,
        folder: str,
        import_timeout_s: float,
        fork: bool,
        num_ranks: int = 1,
        processors: frozenset[int] | None = None,
    ) -> None:
        self._source = source
        self._log, self._folder = log, folder
        self._processors = processors
        started = self._start(fork, num_ranks)
        self._process, self._socket = started.process, started.socket
        self._replies = self._socket.makefile("r")
        self._socket.settimeout(import_timeout_s)
        try:
            line = self._replies.readline()
            if not line:
                self._import_failed(describe_exit(self._process.wait()), started.printed)
        except TimeoutError:
            self.kill()  # or else it ends its import first, and complains in its log that nobody listens
            self.stop()
            self._import_failed(f"did not end within {format_seconds(import_timeout_s)}", started.printed)
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(started.printed)
        self._socket.settimeout(None)
        self.hello: dict[str, Any] = json.loads(line)
        if "error" in self.hello:
            self.stop()
            raise TaskError(self.hello["error"], frames=self.hello.get("frames", ""))

    def fileno(self) -> int:
        """Ready to read when a reply has come."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a request. Raises ProbeFault when the supervisor is gone."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ProbeFault(f"the process that starts probes failed: {error}") from error

    def read(self) -> dict[str, Any]:
        """Read the reply to a request. Raises ProbeFault when the supervisor died."""
        line = ""
        with contextlib.suppress(ConnectionResetError):  # it died before it had read what was sent
            line = self._replies.readline()
        if not line:
            raise ProbeFault(f"the process that starts probes failed: {describe_exit(self._process.wait())}")
        return json.loads(line)  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the supervisor and what it runs; the socket's end tells it to, of which a search that dies leaves neither half."""
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._socket.close()
        self._replies.close()

    def kill(self) -> None:
        """End the supervisor, which hangs, and what it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self, fork: bool, num_ranks: int) -> Started:
        """A supervisor that has been greeted; one that was started ahead, where it was started alike."""
        try:
            self._log.write_bytes(b"")
        except OSError as error:
            raise StudyError(
                f"the log {self._log} cannot be written: {error.strerror}; expected a file that may be "
                "written, on a disk with room: fix that and run again"
            ) from error
        own = dict(os.environ)
        most_threads = num_threads()
        if self._processors is not None:
            most_threads = min(most_threads, len(cores(self._processors)))
        is_built_here = self._source is not None and not self._source.path  # by a script that may have told torch alone
        is_of_machine = self._processors is not None  # what is set is for the whole machine, and these are a part of it
        for variable in THREAD_VARIABLES:
            if is_built_here or (is_of_machine and variable in own):
                own[variable] = str(most_threads)
        started = take(quiet(own), imports=self._source is not None, processors=self._processors)
        greeting = {
            "source": None if self._source is None else self._source.to_dict(),
            "blas_threads": 0 if BLAS_THREADS in own else most_threads,
            "fork": fork,
            "num_ranks": num_ranks,
            "folder": self._folder,
            "log": str(self._log),
        }
        os.write(started.folder, os.fsencode(self._folder))
        os.close(started.folder)
        assert started.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            started.process.stdin.write(json.dumps(greeting).encode() + b"\n")
            started.process.stdin.close()
        return started

    def _import_failed(self, what: str, printed: int) -> NoReturn:
        # what it printed before it knew its log is in the other file
        said = self._log.read_bytes() or os.pread(printed, os.fstat(printed).st_size, 0)
        tail = said.decode(errors="replace").strip()[-1500:]
        label = self._source.label if self._source is not None else "autotune"
        see = "give the search a longer budget if its modules take long to import"
        if self._source is None or self._source.path:
            see = f"run `{os.path.basename(sys.executable)} {label}` to see it fail"
        raise TaskError(
            f"importing {label} {what}; {see}, and keep long or dangerous work inside functions", frames=tail
        )
