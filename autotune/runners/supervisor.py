"""The process that starts, watches and cleans up after probes: a fork server that has imported torch and the user's module once.

It holds one thread and no CUDA context, so that a fork is safe. Where importing the user's module breaks that, every job gets a
new interpreter instead. It kills and reaps whatever a job leaves behind, and it ends when the search does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from autotune.devices.linux import end_with_parent, kernel_oom_kills, read
from autotune.runners.ended import has_ended, open_process
from autotune.runners.ranks import answer_file, group_file, question_file, rank_file

_PR_SET_CHILD_SUBREAPER = 36
_CUDA_ERROR_NOT_INITIALIZED = 3
_LAST_WORDS_S = 0.5  # of the other ranks, once one has failed
_ANSWER_S = 2.0  # for all ranks to tell where they are; one that hangs may give no answer
_DEATH_S = 0.5  # of the search, until it is seen by who outlives it
_GIVE_UP_S = 5.0  # killed processes that have not ended by then are stuck in a driver


def main() -> None:
    """Serve requests on a socket until it is closed. The first argument says how it was started (`autotune.runners.start`)."""
    started = json.loads(sys.argv[1])
    connection = socket.socket(fileno=started["socket"])
    if started["processors"] is not None:  # before torch asks how many there are
        os.sched_setaffinity(0, started["processors"])
    for number in (signal.SIGINT, signal.SIGTERM):  # what these end, the search decides
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    end_with_parent()  # an import may hang, and nobody reads the socket then
    with _guarded(started, connection):
        if started["imports"]:
            # else `torch.cuda.is_available()` in the user's module calls cuInit, after which no fork can use the GPU
            os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
            with _without_collecting():
                _import_everything()
        greeting = json.loads(sys.stdin.readline())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _print_to(greeting["log"])
        source, blas_threads = greeting["source"], greeting["blas_threads"]
        hello, task = _import(source, greeting) if source is not None else ({"no_fork": ""}, None)
    _own_children.update(_children())  # a server that the user's module has started, say, which every job uses
    end_with_parent(False)  # from here on the closed socket says so, and what a probe left behind is reaped
    if blas_threads:
        os.environ.pop("OPENBLAS_NUM_THREADS", None)
    _send(connection, hello)
    inbox = Inbox(connection, greeting["folder"])
    while "error" not in hello and (request := inbox.next()) is not None:
        if "cancel" not in request:  # else the job had ended by itself
            request |= {"blas_threads": blas_threads, "source": source}
            _send(connection, _serve(request, task, inbox))
    inbox.leave()


@contextlib.contextmanager
def _guarded(started: dict[str, Any], connection: socket.socket) -> Iterator[None]:
    """Let another process remove the search's folder where the search dies inside the block, and this process with it."""
    search, importing = (open_process(pid) for pid in (os.getppid(), os.getpid()))
    if os.getppid() != started["parent"]:
        _remove_told(started["folder"])
        os._exit(0)
    if not (guard := os.fork()):
        os.close(connection.detach())
        has_ended(importing, None)
        if has_ended(search, _DEATH_S):
            _remove_told(started["folder"])
        os._exit(0)
    for descriptor in (search, importing, started["folder"]):
        os.close(descriptor)
    yield
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # the user's module may have waited for it
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)


def _remove_told(descriptor: int) -> None:
    """Remove the folder whose name a search that has died wrote into a pipe, if it had come so far."""
    with contextlib.suppress(BlockingIOError):  # another process holds the pipe open, and nothing was written
        if name := os.read(descriptor, select.PIPE_BUF):
            shutil.rmtree(os.fsdecode(name), ignore_errors=True)


def _print_to(log: str) -> None:
    """Let this process print to a log, which begins with what it has printed so far."""
    sys.stdout.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, os.pread(1, os.fstat(1).st_size, 0))
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


class Inbox:
    """Reads the search's messages, one JSON object a line.

    Args:
        folder: the search's, in which it keeps what the two share.
    """

    def __init__(self, connection: socket.socket, folder: str) -> None:
        self.connection, self._folder = connection, folder
        self._unread = b""

    def receive(self) -> bool:
        """Wait for more to come. False when the search has closed the socket."""
        data = self.connection.recv(65536)
        self._unread += data
        return bool(data)

    def next(self, *, wait: bool = True) -> dict[str, Any] | None:
        """The next message; None when the search has closed the socket, or, without `wait`, when no whole line has come."""
        while b"\n" not in self._unread:
            if not wait or not self.receive():
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]

    def leave(self) -> NoReturn:
        """End this process, as the search has; where that died, its folder goes, too."""
        poll = select.poll()
        poll.register(
            self.connection, 0
        )  # a search that stops its supervisor waits for that with half of the socket open
        if poll.poll(0):
            shutil.rmtree(self._folder, ignore_errors=True)
        for child in _own_children & _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os._exit(0)  # a thread that the user's module started would keep the interpreter alive


def _import(source: dict[str, Any], greeting: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Import the user's module. Returns what the search is told of it, and the task (None where forking is not safe)."""
    import torch

    from autotune.errors import AutotuneError
    from autotune.runners.runner import Stated
    from autotune.task.loading import load_source
    from autotune.task.source import TaskSource
    from autotune.units import plural

    if greeting["num_ranks"] > 1 and torch.distributed.is_available():
        with _without_collecting():
            import torch.distributed.optim
    origin = TaskSource.from_dict(source)
    before = _num_threads()
    try:
        with _capability_without_cuda():
            task = load_source(origin)
    except AutotuneError as error:
        return {"error": str(error), "frames": error.frames}, None
    except BaseException as error:
        frames = "".join(traceback.format_exception(error))
        return {"error": f"importing the model file raised {type(error).__name__}: {error}", "frames": frames}, None
    no_fork = "" if greeting["fork"] else "asked for"
    if (threads := _num_threads()) > max(1, before):
        no_fork = (
            f"importing the model file started {plural(threads - before, 'thread')}; start them inside its functions"
        )
    elif _has_cuda_context():
        no_fork = "importing the model file initialised CUDA; build and move models inside build_model"
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, pages that probes share
    stated = Stated.of(task, origin).to_dict()
    return {"no_fork": no_fork, "stated": stated}, None if no_fork else task


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Import without garbage collection, and exempt what was imported from later collections: both take most of a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import_everything() -> None:
    """Import all that a probe needs, so that it is there after a fork: also what torch imports late."""
    import threadpoolctl  # noqa: F401
    import torch
    import torch._dynamo  # an optimizer's first step imports it, which takes a second or two
    import torch.utils.checkpoint

    import autotune.probe.checks
    import autotune.probe.evaluation
    import autotune.probe.inspection
    import autotune.runners.worker  # noqa: F401
    from autotune.errors import ConfigError
    from autotune.probe.observers.base import kinds

    with contextlib.suppress(ConfigError):  # each probe says so
        kinds()

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)  # no backward: the autograd engine starts a thread for each GPU
    # Let torch find no GPU meanwhile: since 2.12 an optimizer's step asks for its stream, which initialises CUDA. Not by
    # CUDA_VISIBLE_DEVICES: were the driver initialised meanwhile, this process and its forks would see no GPU for ever.
    # What torch imports or the user's module asks must see the GPUs, since they may keep what they found.
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        for optimizer in (torch.optim.AdamW([parameter]), torch.optim.SGD([parameter], lr=0.0)):
            optimizer.step()
            optimizer.zero_grad()


def _capability_without_cuda() -> contextlib.AbstractContextManager[Any]:
    """Let NVML say what a GPU can for a while: packages ask when they are imported, as torchao does, which transformers imports.

    CUDA's own answer would initialise it, and each probe would then import all of them again.
    """
    import torch

    asked = torch.cuda.get_device_capability

    def told(device: Any = None) -> tuple[int, int]:
        known = [] if torch.cuda.is_initialized() else _capabilities()
        index = device if isinstance(device, int) else torch.device("cuda" if device is None else device).index or 0
        return known[index] if 0 <= index < len(known) else asked(device)

    return mock.patch.object(torch.cuda, "get_device_capability", told)


def _capabilities() -> list[tuple[int, int]]:
    """Compute capability of each GPU, in CUDA's order; empty where NVML does not know them all, or not the order."""
    from autotune.devices import nvml

    connection = nvml.connect()
    if isinstance(connection, str) or connection.differ():
        return []
    known = [connection.capability(gpu) for gpu in connection.visible_gpus()]
    return [] if (0, 0) in known else known


def _has_cuda_context() -> bool:
    """Whether this process initialised CUDA, after which no fork of it can: as torch says, or the driver's library, where one is loaded.

    Its device files would not do: WSL has others, and NVML opens some of them, too.
    """
    import torch

    if torch.cuda.is_initialized():
        return True
    with contextlib.suppress(OSError):  # not loaded
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != _CUDA_ERROR_NOT_INITIALIZED
    opened = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return any(path.startswith("/dev/kfd") for path in opened)


def _serve(request: dict[str, Any], task: Any, inbox: Inbox) -> dict[str, Any]:
    """Run the jobs of a request, each in a process of its own, until one fails, and report how the last of them ended."""
    deadline = time.monotonic() + request["timeout_s"]
    for job in request["jobs"]:
        ended = _run(request | {"job": job}, task, inbox, deadline)
        if ended["exit_code"]:
            break
    return ended


def _run(request: dict[str, Any], task: Any, inbox: Inbox, deadline: float) -> dict[str, Any]:
    """Run one job, and report how its processes ended, one for each rank of its world. Nothing of it is left running.

    Of several the first that ends badly ends them all: the others would wait for it.
    """
    kills_before = kernel_oom_kills()
    with contextlib.suppress(FileNotFoundError):  # a job before it used the same name, with another group in it
        os.unlink(group_file(request["channel"]))
    pids = [_fork(task, ranked, inbox.connection) if task is not None else _spawn(ranked) for ranked in _ranks(request)]
    ended_by, running = "exit", dict(enumerate(pids))
    statuses: dict[int, int | None] = {}
    while running and ended_by == "exit":
        failed = any(statuses.values())  # another that fails, too, may tell why this one did
        until = min(deadline, time.monotonic() + _LAST_WORDS_S) if failed else deadline
        ended_by, ready = _wait([*running.values()], until, inbox)
        if failed and ended_by == "timeout":
            ended_by = "exit"
            break
        for rank, pid in [*running.items()]:
            if pid in ready:
                [statuses[rank]] = _end([running.pop(rank)])
    may_hang = len(pids) > 1 and ended_by in ("timeout", "cancel")
    answers = _ask(request["channel"], running, inbox) if may_hang else {}
    killed = [*running]
    statuses |= zip(killed, _end(running.values()), strict=True)
    _reap_descendants()
    if ended_by == "closed" or answers is None:
        inbox.leave()
    codes = [
        -signal.SIGKILL if (status := statuses[rank]) is None else os.waitstatus_to_exitcode(status)
        for rank in range(len(pids))
    ]
    by_itself = [code for rank, code in enumerate(codes) if rank not in killed]
    return {
        "exit_code": next(filter(None, by_itself), codes[0]),
        "exit_codes": codes,
        "killed": killed,
        "answers": answers,
        "stuck": None in statuses.values(),
        "timed_out": ended_by == "timeout",
        "cancelled": ended_by == "cancel",
        "oom_killed": kernel_oom_kills() > kills_before,
    }


def _ranks(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The request of each rank; rank 0 alone tells of its progress, the others write what they find into files of their own."""
    channel = request["channel"]
    if request["num_ranks"] > 1:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(question_file(channel), 0o600)
    for rank in range(request["num_ranks"]):
        Path(answer_file(channel, rank)).unlink(missing_ok=True)
        if rank:
            Path(rank_file(channel, rank)).write_bytes(b"")
    return [
        request | {"rank": rank, "channel": rank_file(channel, rank) if rank else channel}
        for rank in range(request["num_ranks"])
    ]


def _ask(channel: str, ranks: Iterable[int], inbox: Inbox) -> dict[int, Any] | None:
    """Ask the ranks where they are, by opening what they wait for. Returns the answers; None where the search closes meanwhile."""
    try:
        os.close(os.open(question_file(channel), os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # none listens yet
        return {}
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + _ANSWER_S
    while (left := [rank for rank in ranks if rank not in answers]) and time.monotonic() < deadline:
        if _wait([], time.monotonic() + 0.01, inbox)[0] == "closed":
            return None
        for rank in left:
            with contextlib.suppress(FileNotFoundError):
                answers[rank] = json.loads(Path(answer_file(channel, rank)).read_text(encoding="utf-8"))
    return answers


def _end(pids: Collection[int]) -> list[int | None]:
    """Kill processes, if they still run, with their groups. Returns their statuses, None for one that does not end.

    Many are waited for no longer than one: the search's patience is the same.
    """
    for pid in pids:
        _kill(pid)
    give_up_s = time.monotonic() + _GIVE_UP_S
    return [_reap(pid, give_up_s) for pid in pids]


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still this process's
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _fork(task: Any, request: dict[str, Any], connection: socket.socket) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    from autotune.runners import worker

    try:
        os.close(connection.detach())
        worker.enter(request)
        worker.run_job(task, request)
    finally:
        os._exit(70)


def _spawn(request: dict[str, Any]) -> int:
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", suffix=".json", delete=False, dir=os.path.dirname(request["channel"])
    ) as file:
        json.dump(request, file)
    command = [sys.executable, "-m", "autotune.runners.worker", file.name]
    with open(request["log"], "ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True).pid


def _wait(pids: list[int], deadline: float, inbox: Inbox) -> tuple[str, list[int]]:
    """Wait for one of the processes to end.

    Returns:
        What ended the wait: `exit`, `timeout`, `cancel` or `closed` (the search is gone); and the processes that have ended.
    """
    processes = {open_process(pid): pid for pid in pids}
    try:
        poll = select.poll()
        for process in processes:
            poll.register(process, select.POLLIN)
        poll.register(inbox.connection.fileno(), select.POLLIN | select.POLLHUP)
        while True:
            if inbox.next(wait=False) is not None:  # while a job runs nothing but its cancellation is sent
                return "cancel", []
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]
            if ended := [pid for process, pid in processes.items() if process in ready]:
                return "exit", ended
            if not ready:
                return "timeout", []
            if not inbox.receive():
                return "closed", []
    finally:
        for process in processes:
            os.close(process)


def _reap(pid: int, give_up_s: float) -> int | None:
    """The status of a process that was killed; None where it does not end, stuck in a driver. It is left alone from then on.

    Args:
        give_up_s: on the monotonic clock, when it must have ended.
    """
    process = open_process(pid)
    try:
        if not has_ended(process, max(0.0, give_up_s - time.monotonic())):
            _stuck.add(pid)
            return None
    finally:
        os.close(process)
    return os.waitpid(pid, 0)[1]


_stuck: set[int] = set()
_own_children: set[int] = set()  # of the import: they end with this process


def _reap_descendants() -> None:
    """Kill and reap whatever a probe left behind; orphans are re-parented to this process, their subreaper."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        children = _children() - _stuck - _own_children
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _children() -> set[int]:
    """The children of this process that have not been waited for."""
    return {int(pid) for pid in read(Path(f"/proc/self/task/{os.getpid()}/children")).split()}


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
