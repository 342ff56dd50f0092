"""A slot on another machine: a `LocalRunner` there (`Station`), and what stands for it here (`RemoteMember`).

Supervisor, deadlines, killing, reaping and outcomes are the local runner's own. What passes between are jobs, how far they have
come, and what comes of them. How calls get there is a `Line`, which is all that a new way to other machines has to bring.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import psutil

from autotune.devices import open_device
from autotune.devices.linux import cores, processors
from autotune.devices.slots import SlotResources, shares_of
from autotune.errors import AutotuneError, DeviceError, TaskError, first_line
from autotune.records.device import DeviceInfo, Slot
from autotune.records.inspection import Inspection
from autotune.records.outcome import Outcome, Progress
from autotune.runners.in_flight import Host, Stay
from autotune.runners.jobs import Job
from autotune.runners.local import LocalRunner
from autotune.runners.logs import Logs
from autotune.runners.ranks import Part
from autotune.runners.runner import Finished, ProbeFault, Stated
from autotune.task.parcel import Parcel
from autotune.units import format_bytes
from autotune.version import __version__

POLL_S = 0.2  # a station says at least so often how far its job has come
SILENCE_S = 30.0  # a station that has said nothing for so long is lost
STOP_S = 15.0  # for a station to end what it runs
LEAST_FREE_BYTES = (
    2**20
)  # of the disk that a station works on: what prints may fail with less, which is no config's fault
START_S = 30.0  # beyond the time for imports, until a station must have loaded the task


@dataclass(frozen=True, kw_only=True)
class Share:
    """A slot's part of its machine.

    Attributes:
        kind: of its device, as `open_device` takes it.
        devices: those that train a config together, as `name_devices` takes them.
        index, num: which of so many slots of the machine it is, from 0.
        part: of a world over several machines; None where this one runs all of it.
    """

    kind: str
    devices: str
    index: int
    num: int
    part: Part | None = None

    def resources(self) -> SlotResources:
        """The same in this machine's own numbers. Devices are taken to be spread evenly over its NUMA nodes."""
        near = open_device(self.kind).near_processors()
        num = max(1, round(self.num * len(near) / len(processors())))
        part = shares_of(cores(near), num)[self.index % num]
        return SlotResources(name=self.kind, device=self.kind, processors=part, num_sharing=self.num)


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a station finds on its machine.

    Attributes:
        device: with the slot's share of memory and threads.
        num_cores: cores that the machine lets it use in all.
        autotune: this package's version there.
    """

    device: DeviceInfo
    num_cores: int
    autotune: str


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a station says once it has loaded the task: attributes of a `Member`."""

    stated: Stated
    slow_start: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class News:
    """What a station says of its job.

    Attributes:
        finished: whether it has ended; then `result` is what came of it, and `log` what was printed.
        fault: why the machinery failed; empty where it did not.
        device: as it is now, where the job has ended.
    """

    progress: Progress | None = None
    found: Any = None
    finished: bool = False
    result: Any = None
    log: bytes = b""
    fault: str = ""
    device: DeviceInfo | None = None
    device_is_lost: bool = False


class Station:
    """A slot, in a process of its machine that answers one call at a time. Where that process dies, all that it started ends."""

    def __init__(self) -> None:
        self._host = Host()
        self._runner: LocalRunner | None = None
        self._folder: Path | None = None
        self._ticket = self._own_ticket = -1  # of the last job: the controller's, and the local runner's
        self._last: News | None = None

    def describe(self, share: Share) -> Described:
        """Say what is here. Raises DeviceError where the device cannot be used."""
        runner = LocalRunner(None, logs=Path(), devices=share.devices, resources=share.resources())
        return Described(device=runner.slots()[0].device, num_cores=len(cores(processors())), autotune=__version__)

    def enter(self, parcel: Parcel, share: Share, import_timeout_s: float) -> Hello:
        """Unpack the task and start the supervisor.

        Raises:
            TaskError: the task cannot be loaded here, or what it needs is not here.
        """
        if missing := parcel.missing():
            raise TaskError(f"there is no {missing[0]}, which the task's code names; copy or mount it there")
        os.environ.update(parcel.environment)
        if share.part is not None:
            use_network(share.part.address)
        self._folder = Path(tempfile.mkdtemp(prefix="autotune-"))
        try:
            self._runner = LocalRunner(
                parcel.unpack(self._folder / "task"),
                logs=self._folder / "logs",
                devices=share.devices,
                import_timeout_s=import_timeout_s,
                host=self._host,
                resources=share.resources(),
                folder=self._folder,
                part=share.part,
            )
            self._runner.keep_compiled(self._folder / "compiled")
            self._runner.__enter__()
        except BaseException:
            self.leave()
            raise
        return Hello(stated=self._runner.stated, slow_start=self._runner.slow_start, notes=self._runner.notes)

    def device(self) -> DeviceInfo:
        """The device as it is now."""
        assert self._runner is not None
        return self._runner.slots()[0].device

    def meet(self, address: str) -> str:
        """A free port of this machine: where ranks of several machines find each other, as `HOST:PORT`."""
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as free:
            free.bind(place)
            return f"{address}:{free.getsockname()[1]}"

    def advance(self, ticket: int, job: Job[Any], beside: tuple[str, ...], meeting: str = "") -> News:
        """Start a job, unless it was, and wait a little for its end. How it ended is told again where that is asked for again.

        Args:
            ticket: the controller's.
            beside: labels of the jobs that ran beside it on this machine so far.
            meeting: where its ranks find those of other machines; empty where all are here.
        """
        if ticket == self._ticket and self._last is not None:
            return self._last
        try:
            news = self._advance(ticket, job, beside, meeting)
        except (ProbeFault, OSError) as fault:  # a full disk, say
            news = News(fault=first_line(fault))
        if news.finished or news.fault:
            self._last = news
        return news

    def _advance(self, ticket: int, job: Job[Any], beside: tuple[str, ...], meeting: str) -> News:
        assert self._runner is not None
        if ticket != self._ticket:
            self._ticket, self._last = ticket, None
            self._require_room()
            self._runner.meet(meeting)
            self._own_ticket = self._runner.submit(job)
        self._host.put_beside(self._own_ticket, beside)
        finished = self._runner.collect(POLL_S)
        if finished is None:
            return News(progress=self._runner.progress(self._own_ticket), found=self._runner.found(self._own_ticket))
        if isinstance(finished.result, Outcome) and not finished.result.ok:
            self._require_room()
        return News(
            finished=True,
            result=finished.result,
            log=self._take_log(),
            device=self.device(),
            device_is_lost=self._runner.device_is_lost,
        )

    def _require_room(self) -> None:
        """Raise ProbeFault where the disk is full."""
        assert self._folder is not None
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < LEAST_FREE_BYTES:
            raise ProbeFault(
                f"the disk of {self._folder.parent} is full ({format_bytes(free_bytes)} are free); make room there"
            )

    def cancel(self, ticket: int) -> None:
        """End a job, if it still runs."""
        if self._runner is not None and ticket == self._ticket:
            self._runner.cancel(self._own_ticket)

    def learn(self, inspection: Inspection) -> None:
        """As `LocalRunner.learn`."""
        assert self._runner is not None
        self._runner.learn(inspection)

    def leave(self) -> None:
        """End the supervisor and what it runs, and delete what was kept."""
        if self._runner is not None:
            self._runner.__exit__(None, None, None)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _take_log(self) -> bytes:
        """What the last job printed, which goes home."""
        assert self._folder is not None
        printed = b""
        for log in (self._folder / "logs").glob("[0-9]*.log"):
            printed = log.read_bytes()
            log.unlink()
        return printed


def use_network(address: str) -> None:
    """Have what is started here reach other machines through the network that this machine has an address in.

    A machine has several networks, and what torch takes by itself may be one that the others do not see.
    """
    for name, found in psutil.net_if_addrs().items():
        if address in (one.address for one in found):
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)


class Line(Protocol):
    """Calls a `Station`."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method, after those before it.

        The future raises the AutotuneError that the method raises, ConnectionError where the machine cannot be reached for now, and
        ProbeFault where the station is gone.
        """
        ...

    def close(self) -> None:
        """End the station's process, whatever it does."""


def name_slot(machines: Sequence[str], devices: str) -> str:
    """A slot's name: `machine/cuda:0`, or `machine+other/cuda:0,1` where several have a part of it."""
    return f"{'+'.join(machines)}/{devices}"


def machines_of(slot: str) -> list[str]:
    """The machines in a slot's name."""
    return slot.rpartition("/")[0].split("+")


class Bell:
    """A descriptor that can be read once another thread has rung."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def ring(self, _: object = None) -> None:
        """Make it readable, unless it is closed: its number may be another file's by then."""
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def hush(self) -> None:
        """Make it unreadable until it rings again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1


class RemoteMember:
    """A slot elsewhere, as one of several here.

    Args:
        name: of the slot, `machine/cuda:0`.
        device: as it was described.
        parcel: the task, as the line takes it.
        host: where the jobs of the search are kept.
        logs: folder for what jobs print there, which comes home.
    """

    def __init__(
        self,
        name: str,
        line: Line,
        device: DeviceInfo,
        share: Share,
        parcel: Any,
        *,
        host: Host,
        logs: Path,
        import_timeout_s: float,
    ) -> None:
        self.name = name
        self.stated, self.slow_start = Stated(), ""
        self.notes: tuple[str, ...] = ()
        self.device_is_lost = False
        self._line, self._share, self._parcel = line, share, parcel
        self._device, self._host, self._logs = device, host, Logs(logs)
        self._import_timeout_s = import_timeout_s
        self._bell: Bell | None = None  # rings when the call in flight has been answered
        self._stay: Stay | None = None
        self._log = Path()
        self._meeting = ""
        self._answer: Future[News] = Future()
        self._heard_s = 0.0  # when the station last said something
        self._news = News()

    @property
    def machine(self) -> str:
        """The machine's part of the name."""
        [machine] = machines_of(self.name)
        return machine

    def __enter__(self) -> Self:
        asked = self._line.call("enter", self._parcel, self._share, self._import_timeout_s)
        try:
            hello: Hello = asked.result(self._import_timeout_s + START_S)
        except ProbeFault as fault:
            raise ProbeFault(f"{self.machine}: {fault}") from fault
        except AutotuneError as error:
            raise type(error)(f"on {self.machine}: {error}", frames=error.frames) from None
        except (ConnectionError, TimeoutError):
            raise ProbeFault(f"{self.machine} gave no answer while it loaded the task") from None
        self.stated, self.slow_start, self.notes = hello.stated, hello.slow_start, hello.notes
        self._logs.open()
        self._bell = Bell()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End what runs there."""
        with contextlib.suppress(AutotuneError, ConnectionError, TimeoutError):
            self._line.call("leave").result(STOP_S)
        self._line.close()
        if self._stay is not None:
            self._forget()
        if self._bell is not None:
            self._logs.tidy()
            self._bell.close()
            self._bell = None

    def slots(self) -> tuple[Slot, ...]:
        if self._stay is None and self._bell is not None:
            try:
                self._device = self._line.call("device").result(SILENCE_S)
            except (ProbeFault, ConnectionError, TimeoutError) as error:
                raise DeviceError(f"{self.name} does not answer: {first_line(error)}") from None
        return (Slot(name=self.name, device=self._device),)

    def meet(self, address: str) -> str:
        """As `Station.meet`. Raises ProbeFault."""
        try:
            return str(self._line.call("meet", address).result(SILENCE_S))
        except (ConnectionError, TimeoutError) as error:
            raise ProbeFault(f"{self.machine} does not answer: {first_line(error)}") from None

    def submit(self, job: Job[Any], meeting: str = "") -> int:
        """As `Member.submit`. `meeting` is where the ranks of several machines find each other."""
        stay = self._host.take({self.name: self._device.name}, job)
        try:
            self._log = self._logs.begin(job.name)
        except BaseException:
            self._host.leave(stay.ticket)
            raise
        self._stay, self._news, self._heard_s = stay, News(progress=Progress()), time.monotonic()
        self._meeting = meeting
        self._ask()
        return stay.ticket

    def collect(self, timeout_s: float | None) -> Finished | None:
        """As `Runner.collect`; never waits: `news` says when to come again."""
        stay = self._stay
        assert stay is not None and self._bell is not None, "nothing is in flight; submit a job first"
        self._bell.hush()
        if self._answer.done():
            try:
                self._news = self._answer.result()
                self._heard_s = time.monotonic()
            except ConnectionError:  # the network is away, and may come back
                time.sleep(POLL_S)
            except AutotuneError as error:
                self._forget()
                raise ProbeFault(first_line(error)) from error
            if self._news.fault:
                self._forget()
                raise ProbeFault(self._news.fault)
            if self._news.finished:
                return self._finish(stay)
            self._ask()
        if time.monotonic() >= self._heard_s + SILENCE_S:
            self._forget()
            raise ProbeFault(f"{self.machine} has given no answer for {SILENCE_S:.0f} s")
        return None

    def progress(self, ticket: int) -> Progress | None:
        return self._news.progress if self._stay is not None and self._stay.ticket == ticket else None

    def found(self, ticket: int) -> Any:
        return self._news.found if self._stay is not None and self._stay.ticket == ticket else None

    def cancel(self, ticket: int) -> None:
        if self._stay is not None and self._stay.ticket == ticket:
            self._line.call("cancel", ticket)

    def learn(self, inspection: Inspection) -> None:
        self._line.call("learn", inspection)

    @property
    def news(self) -> tuple[list[int], float]:
        """As `Member.news`."""
        if self._stay is None or self._bell is None:
            return [], math.inf
        return [self._bell.fileno()], self._heard_s + SILENCE_S

    def _ask(self) -> None:
        """Have the station start the job, or wait on for its end."""
        stay = self._stay
        assert stay is not None and self._bell is not None
        here = tuple(label for label in stay.beside if self.machine in machines_of(label.rpartition(" on ")[2]))
        self._answer = self._line.call("advance", stay.ticket, stay.job, here, self._meeting)
        self._answer.add_done_callback(self._bell.ring)

    def _finish(self, stay: Stay) -> Finished:
        news = self._news
        self._device = news.device or self._device
        self.device_is_lost = news.device_is_lost
        log = ""
        if news.log:
            with contextlib.suppress(OSError):  # the finding is worth more
                self._log.write_bytes(news.log)
                log = str(self._log)
        result = news.result
        if isinstance(result, Outcome):
            result = replace(result, log=log)
        self._forget()
        return Finished(ticket=stay.ticket, result=stay.place(result))

    def _forget(self) -> None:
        """Free the slot."""
        assert self._stay is not None
        self._host.leave(self._stay.ticket)
        self._stay = None
        with contextlib.suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()
