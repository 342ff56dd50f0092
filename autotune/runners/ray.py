"""`RayRunner`: jobs on the machines of a Ray cluster. Ray places one long-lived actor a slot, and carries calls to it; no more.

No task a probe, and no retries: what becomes of a job whose machine is lost, the search decides.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self
from unittest import mock

from autotune.devices import TYPES, capabilities_of, require_linux
from autotune.devices.calibration import arithmetic
from autotune.devices.cpu import CpuDevice
from autotune.devices.cuda import CudaDevice
from autotune.devices.linux import PROC, end_with_parent
from autotune.errors import AutotuneError, ConfigError, DeviceError, first_line, in_one_line
from autotune.records.config import World
from autotune.records.device import DeviceInfo, Slot
from autotune.records.options import ONE_DEVICE, ONE_SLOT, SearchOptions
from autotune.runners.alike import Offer, choose, differences
from autotune.runners.elsewhere import Elsewhere
from autotune.runners.in_flight import Host
from autotune.runners.jobs import Job
from autotune.runners.ranks import Part
from autotune.runners.remote import Described, RemoteMember, Share, Station, machines_of, name_slot
from autotune.runners.runner import NoSlotLeft, ProbeFault, Runner, SlotLost
from autotune.runners.slots import SeveralSlots
from autotune.runners.spread import SpreadMember
from autotune.task.parcel import pack
from autotune.task.source import TaskSource
from autotune.units import format_bytes, plural

PLACE_S = 60.0  # for the first actor to start: a new process, which imports ray
LATER_S = 10.0  # for the others after it; those whose machine is taken come later, or not
LOOK_S = 2.0  # between two looks at the cluster's nodes
ANOTHER_S = 30.0  # for another slot, where the last one is lost
MOST_LOSSES = 2  # slots that a node may lose; it is not used any more then
MOST_CALLS = 256  # that wait for an answer at once, each in a thread
LOCAL = "local"  # Ray's name for a cluster of its own
STORE_BYTES = 2**29  # of a Ray that is started here: what is sent of a task fits in
# of a Ray that is started here: workers have this process's priority, memory is this package's concern, and nobody is told of it
SETTINGS = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class OnRay(Elsewhere):
    """`--runner ray`, `--runner ray:ADDRESS`."""

    name: ClassVar[str] = "ray"
    summary: ClassVar[str] = (
        "the machines of a Ray cluster: ray://HOST:PORT, ray:HOST:PORT, or that of RAY_ADDRESS; else one on this machine"
    )

    def runner(self, source: TaskSource, options: SearchOptions, where: str, logs: Path) -> Runner:
        address = f"{self.name}:{where}" if where.startswith("//") else where
        return RayRunner(
            source,
            address=address,
            device=options.device,
            devices=options.devices,
            slots=options.slots,
            logs=logs,
            import_timeout_s=max(180.0, options.longest_s),
        )


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What slots the user wants.

    Attributes:
        kind: `cpu` or `cuda`; `auto` takes the GPUs if the cluster has any.
        size: devices of a node that train a config together.
        nodes: how many nodes train a config together.
        parts: slots that share the CPU of a node.
        most: slots; None for as many as there are.
    """

    kind: str
    size: int = 1
    nodes: int = 1
    parts: int = 1
    most: int | None = None

    @property
    def devices(self) -> str:
        """The devices of a node that train together, as its own `name_devices` takes them."""
        return f"cpu:{self.size}" if self.size > 1 and not capabilities_of(self.kind).own_processors else str(self.size)

    @property
    def devices_here(self) -> dict[str, str]:
        """As `Runner.devices_here`."""
        if self.nodes > 1:
            return {"devices": f"{self.nodes}x{self.size}"}
        return {"devices": self.devices} if self.size > 1 else {"device": self.kind}

    @classmethod
    def of(cls, device: str, devices: str, slots: str) -> Self:
        """Read it from the options. Raises ConfigError."""
        if device not in ("auto", *TYPES):
            raise ConfigError(
                f"--device {device} names one device of one machine; on a Ray cluster expected one of auto, {', '.join(TYPES)}"
            )
        together = re.fullmatch(r"(?:(cpu):)?(?:([1-9]\d*)x)?([1-9]\d*)", devices)
        if together is None:
            raise ConfigError(
                f"--devices {devices}: a Ray cluster chooses the devices; expected how many of a node, 4 or cpu:4, or 2x4 for those of 2 "
                "nodes together"
            )
        cut = re.fullmatch(r"(?:(cpu):)?([1-9]\d*)|all", slots)
        if cut is None:
            raise ConfigError(
                f"--slots {slots}: a Ray cluster chooses the devices; expected how many slots, all, or cpu:2"
            )
        kinds = {kind for kind in (together[1], cut[1], device if device != "auto" else None) if kind}
        if len(kinds) > 1:
            raise ConfigError(
                f"--device {device}, --devices {devices} and --slots {slots} contradict each other; leave one out"
            )
        number = int(cut[2]) if cut[2] and slots != ONE_SLOT else None
        return cls(
            kind=next(iter(kinds), "auto"),
            size=int(together[3]),
            nodes=int(together[2] or 1),
            parts=number if number and cut[1] else 1,
            most=None if cut[1] else number,
        )


@dataclass(frozen=True, kw_only=True)
class Place:
    """What Ray is asked for on a node, so that it starts nothing else beside it.

    Attributes:
        node: its name, unique in the cluster; `node_id` is Ray's.
        address: at which other nodes reach it.
    """

    node: str
    node_id: str
    address: str
    share: Share
    num_cpus: float
    num_gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """The same in Ray's words."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus}


Seat = tuple[Place, ...]  # of a slot: one place; where nodes train together, one on each


def name_of(seat: Seat) -> str:
    """The names of a seat's nodes."""
    return " and ".join(place.node for place in seat)


def ids_of(seat: Seat) -> tuple[str, ...]:
    """Ray's ids of a seat's nodes."""
    return tuple(place.node_id for place in seat)


class RayStation(Station):
    """A `Station` in an actor."""

    def __init__(self) -> None:
        super().__init__()
        end_with_parent()  # a node that is killed leaves its actors behind
        self.notes = undo_for_workers()

    def whereabouts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The numbers that Ray has for the actor's GPUs on their node, and what of Ray's own ways could not be undone there."""
        import ray

        return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ())), self.notes


def undo_for_workers() -> tuple[str, ...]:
    """Make this process what Ray's node itself is, and with it what it starts. Ray gives its workers a low priority, few threads and
    a high score for the kernel's out-of-memory killer, and blocks a signal.

    Returns:
        What could not be undone, in words.
    """
    node = os.getppid()
    notes: tuple[str, ...] = ()
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, node))
    except PermissionError:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        notes = (
            f"Ray's workers have a nice level of {nice}: all other work goes before probes; set RAY_worker_niceness=0 where Ray is started",
        )
    with contextlib.suppress(OSError):  # no more than a score
        (PROC / "self/oom_score_adj").write_text((PROC / f"{node}/oom_score_adj").read_text())
    if b"\0OMP_NUM_THREADS=" not in b"\0" + (PROC / f"{node}/environ").read_bytes():
        os.environ.pop("OMP_NUM_THREADS", None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return notes


class ActorLine:
    """Calls an actor.

    Args:
        group: the placement group that it is in; None where it is in none.
    """

    def __init__(self, actor: Any, node: str, group: Any = None) -> None:
        self._actor: Any = actor
        self._node, self._group = node, group

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self._actor is None:
            answer.set_exception(ProbeFault(f"its process on {self._node} was ended"))
            return answer
        told: Future[Any] = getattr(self._actor, method).remote(*arguments).future()
        told.add_done_callback(lambda told: self._pass_on(told, answer))
        return answer

    def close(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # it is gone already, or the cluster is
            ray.kill(self._actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._actor = None  # Ray would take a handle that goes later for one of the process's next cluster

    def _pass_on(self, told: Future[Any], answer: Future[Any]) -> None:
        from ray.exceptions import ActorUnavailableError, RayTaskError

        error = told.exception()
        if error is None:
            answer.set_result(told.result())
        elif isinstance(error, RayTaskError):
            cause = error.cause
            answer.set_exception(cause if isinstance(cause, AutotuneError) else ProbeFault(in_one_line(cause)))
        elif isinstance(error, ActorUnavailableError):
            answer.set_exception(ConnectionError(first_line(error)))
        else:
            answer.set_exception(ProbeFault(f"its process on {self._node} has ended: {_why(error)}"))


def _why(error: BaseException) -> str:
    """What Ray says of an actor that died, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if re.search(r"because|cause|died|ModuleNotFoundError|ImportError", line)]
    return (told or lines or [type(error).__name__])[-1][:300]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A place whose actor has said what is there.

    Attributes:
        gpus: the numbers that Ray has for the GPUs on their node.
        notes: what of Ray's ways could not be undone.
    """

    place: Place
    line: ActorLine
    described: Described
    gpus: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def number(self) -> str:
        """Of its GPUs, or of the part of the CPU; empty where the slot has all of that."""
        share = self.place.share
        return ",".join(self.gpus) if self.gpus else str(share.index) if share.num > 1 else ""

    @property
    def offer(self) -> Offer:
        """What is compared with the others."""
        return Offer(described=self.described, num=self.place.share.num)


def slot_of(seat: Sequence[Found]) -> str:
    """The name of a slot."""
    kind, numbers = seat[0].described.device.kind, "+".join(filter(None, (found.number for found in seat)))
    return name_slot([found.place.node for found in seat], f"{kind}:{numbers}" if numbers else kind)


@contextlib.contextmanager
def connect(address: str) -> Iterator[Any]:
    """The module `ray`, connected to a cluster: the one that this process is connected to already, else that of the address.

    Raises:
        ConfigError: none answers there.
    """
    import ray

    if ray.is_initialized():
        yield ray
        return
    with contextlib.ExitStack() as stack:
        own: dict[str, Any] = {}
        if address == LOCAL:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-", ignore_cleanup_errors=True))
            own = {
                "include_dashboard": False,
                "object_store_memory": STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": folder,
            }
        handler = signal.getsignal(signal.SIGTERM)
        try:
            with set_variables(SETTINGS if own else {}):
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
        except Exception as error:
            raise ConfigError(
                f"no Ray cluster can be reached at {address} ({first_line(error)}); expected the address of a running one, whose Ray "
                f"and Python are those of this process ({ray.__version__}), or none for a Ray on this machine alone"
            ) from error
        stack.callback(ray.shutdown)
        # Ray tells on stdout, where the answer goes, what befalls its nodes
        stack.enter_context(mock.patch.object(ray._private.worker, "print_to_stdstream", create=True))
        signal.signal(signal.SIGTERM, handler)
        yield ray


@contextlib.contextmanager
def set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment meanwhile. What Ray sets there itself, such as how it authenticates, stays."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _close(seat: Sequence[Found]) -> None:
    for found in seat:
        found.line.close()


class RayRunner(SeveralSlots):
    """Runs jobs in slots on the nodes of a Ray cluster.

    It connects when its slots are first asked for. Nodes unlike most are left out. A node that comes later is used, too.

    Args:
        source: how a process gets the task.
        address: as `ray.init` takes it; empty for that of RAY_ADDRESS, or else a Ray of its own on this machine.
        device: `auto`, `cpu` or `cuda`.
        devices: how many of a node train a config together: `4`, or `cpu:2` for processes on its CPU; `2x4` for four of each of two nodes.
        slots: at most so many slots; `cpu:2` cuts the CPU of each node into so many. By default each GPU, or each node's CPU, is one.
        logs: folder for what the user's code prints, which comes home.
        import_timeout_s: for importing torch and the user's module.

    Raises:
        ConfigError: Ray is not installed, or an option cannot be had on it.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        logs: Path,
        address: str = "",
        device: str = "auto",
        devices: str = ONE_DEVICE,
        slots: str = ONE_SLOT,
        import_timeout_s: float = 180.0,
    ) -> None:
        require_linux()
        if find_spec("ray") is None:
            raise ConfigError(
                "--runner ray needs Ray, which is not installed; `pip install 'autotune-torch[ray]'` adds it"
            )
        super().__init__(source, logs)
        self._source = source
        self._address = address or os.environ.get("RAY_ADDRESS", "") or LOCAL
        self._wish = Wish.of(device, devices, slots)
        self.world = World(size=self._wish.nodes * self._wish.size)
        several = f"on {devices}" if devices != ONE_DEVICE else ""
        parts = f"on 1 of {self._wish.parts} parts" if self._wish.parts > 1 else ""
        self.version = " ".join(filter(None, (source.version, several, parts)))
        self._import_timeout_s = import_timeout_s
        self._reference: DeviceInfo | None = None  # what all slots are like; known once it is connected
        self._cluster = contextlib.ExitStack()
        self._pool = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="autotune-ray")
        self._lines: list[ActorLine] = []
        self._nodes: dict[str, str] = {}  # Ray's id -> name
        self._asked: dict[Seat, str] = {}  # the slot that came of each; empty where none has
        self._losses = Counter[tuple[str, ...]]()  # slots that a node, or nodes together, have lost
        self._coming: dict[Seat, Future[RemoteMember | SpreadMember]] = {}
        self._looking: Future[list[dict[str, Any]]] | None = None
        self._looked_s = 0.0
        self._gained: list[str] = []

    def __enter__(self) -> Self:
        self._open()
        self._enter_all(len(self._members))
        return self

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self._cluster.close()

    def slots(self) -> tuple[Slot, ...]:
        self._open()
        return super().slots()

    @property
    def devices_here(self) -> Mapping[str, str]:
        return self._wish.devices_here

    def new_slots(self) -> tuple[str, ...]:
        self._look()
        gained, self._gained = tuple(self._gained), []
        return gained

    def submit(self, job: Job[Any], slot: str = "") -> int:
        if not self._members:
            raise NoSlotLeft("the Ray cluster has no slot left", ())
        return super().submit(job, slot)

    def _open(self) -> None:
        """Connect to the cluster, and find the slots."""
        if self._reference is not None:
            return
        parcel = pack(self._source)
        told = {name: value for name, value in arithmetic().items() if value}
        parcel = replace(parcel, environment={**told, **parcel.environment})
        with contextlib.ExitStack() as stack:
            self._ray = stack.enter_context(connect(self._address))
            stack.callback(self._pool.shutdown)
            stack.callback(self._close_lines)
            self._parcel = self._ray.put(parcel)
            self._reference = self._find_slots()
            self._cluster = stack.pop_all()
        nodes = {machine for name in self._members for machine in machines_of(name)}
        self.notes = (
            f"{plural(len(self._members), 'slot')} on {plural(len(nodes), 'node')}: {', '.join(self._members)}",
            f"sent to each node: {parcel.describe()}",
            *self.notes,
        )

    def _find_slots(self) -> DeviceInfo:
        """Make the members that there can be now. Returns what their devices are like.

        Raises:
            DeviceError: there is none.
        """
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        if self._wish.kind == "auto":
            has_gpus = any(node["Resources"].get("GPU") for node in nodes)
            self._wish = replace(self._wish, kind=CudaDevice.kind if has_gpus else CpuDevice.kind)
        self._require_room(nodes)
        asked = {seat: self._begin(seat) for seat in self._seats(nodes)}
        wait(asked.values(), PLACE_S, FIRST_COMPLETED)
        wait(asked.values(), LATER_S)
        found, told = [], []
        for seat, answer in asked.items():
            if not answer.done():
                self._coming[seat] = self._pool.submit(self._bring, answer)
                told.append(
                    f"{name_of(seat)} is not used yet: others hold what a slot there needs, as `ray status` shows"
                )
                continue
            try:
                found.append(answer.result())
            except AutotuneError as error:
                told.append(f"{name_of(seat)} is left out: {error}")
        if not found:
            raise DeviceError(f"no node of the Ray cluster can be used: {'; '.join(dict.fromkeys(told))}")
        reference, unlike = self._settle(found)
        self.notes = tuple(
            dict.fromkeys((*told, *unlike, *(note for seat in found for one in seat for note in one.notes)))
        )
        return reference

    def _require_room(self, nodes: list[dict[str, Any]]) -> None:
        """Raise DeviceError where no living nodes have what a slot takes."""
        if self._seats(nodes):
            return
        able = {place.node_id for place in self._places(nodes)}
        why = "none has a CPU that Ray may use"
        if capabilities_of(self._wish.kind).own_processors:
            most = max((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)
            why = "none has a GPU; use --device cpu to train on CPUs"
            if most:
                why = (
                    f"--devices {self._wish.size} are more than one node has ({most}), and processes on several nodes wait for their "
                    f"network in every step; where that is meant, say how many of each node: --devices 2x{most}"
                )
        if able:
            why = f"{self._wish.nodes} nodes are to train together, and {len(able)} has what each of them takes"
        raise DeviceError(f"no node of the Ray cluster can be used: {why}")

    def _settle(self, found: list[tuple[Found, ...]]) -> tuple[DeviceInfo, list[str]]:
        """Take in the slots that are like most. Returns what they are like, and what to tell of the others and of this machine.

        Raises:
            DeviceError: there is none.
        """
        here = self._device_here()
        every = [one for seat in found for one in seat]
        reference, whys = choose([one.offer for one in every], here)
        why_not = {one.place: why for one, why in zip(every, whys, strict=True) if why}
        told = [f"{place.node} is left out: {why}" for place, why in why_not.items()]
        used = [seat for seat in found if not any(one.place in why_not for one in seat)][: self._wish.most]
        if not used:
            raise DeviceError("; ".join(["no node of the Ray cluster can be used", *dict.fromkeys(told)]))
        for seat in found:
            if seat in used:
                self._members[slot_of(seat)] = self._member(seat)
                self._asked[tuple(one.place for one in seat)] = slot_of(seat)
            else:
                _close(seat)
        self.keeps_traces = here is not None and not differences(reference, here)
        if here is not None and not self.keeps_traces:
            told.append(
                f"probes run on {reference.model} with {format_bytes(reference.total_bytes)} and torch {reference.torch_version}; this "
                f"machine has {differences(here, reference)}"
            )
        return reference, told

    def _device_here(self) -> DeviceInfo | None:
        """The device of this machine as a slot would have it; None where it has none of the kind."""
        share = Share(kind=self._wish.kind, devices=self._wish.devices, index=0, num=self._wish.parts)
        try:
            return Station().describe(share).device
        except DeviceError:
            return None

    def _places(self, nodes: list[dict[str, Any]]) -> list[Place]:
        """The places that living nodes have for slots, or parts of them: the first of each node, then the second of each, and so on."""
        found = []
        for node in nodes:
            cpus, gpus = int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))
            on_cpu = not capabilities_of(self._wish.kind).own_processors
            num = (self._wish.parts if cpus else 0) if on_cpu else gpus // self._wish.size
            found += [
                Place(
                    node=self._name(node),
                    node_id=node["NodeID"],
                    address=node["NodeManagerAddress"],
                    share=Share(kind=self._wish.kind, devices=self._wish.devices, index=index, num=num),
                    num_cpus=cpus // num if cpus >= num else cpus / num,
                    num_gpus=0 if on_cpu else self._wish.size,
                )
                for index in range(num)
                if node["Alive"]
            ]
        return sorted(found, key=lambda place: place.share.index)

    def _seats(self, nodes: list[dict[str, Any]]) -> list[Seat]:
        """The seats on living nodes that were not asked for yet."""
        taken = {(place.node_id, place.share.index) for seat in self._asked for place in seat}
        free: dict[int, list[Place]] = {}
        for place in self._places(nodes):
            if (place.node_id, place.share.index) not in taken:
                free.setdefault(place.share.index, []).append(place)
        num = self._wish.nodes
        seats = [
            tuple(places[at : at + num]) for places in free.values() for at in range(0, len(places) - num + 1, num)
        ]
        seats = [seat for seat in seats if self._losses[ids_of(seat)] < MOST_LOSSES]
        return seats if num == 1 else [self._part(seat) for seat in seats]

    def _part(self, seat: Seat) -> Seat:
        """A seat on nodes that train together, with the ranks of each."""
        return tuple(
            replace(
                place,
                share=replace(
                    place.share,
                    part=Part(first=number * self._wish.size, world_size=self.world.size, address=place.address),
                ),
            )
            for number, place in enumerate(seat)
        )

    def _name(self, node: dict[str, Any]) -> str:
        """The name of a node: its host's, with a number where it is not the first of that host."""
        if node["NodeID"] not in self._nodes:
            host, number = node["NodeManagerHostname"], 1
            while (name := host if number == 1 else f"{host}.{number}") in self._nodes.values():
                number += 1
            self._nodes[node["NodeID"]] = name
        return self._nodes[node["NodeID"]]

    def _begin(self, seat: Seat) -> Future[tuple[Found, ...]]:
        self._asked[seat] = ""
        return self._pool.submit(self._ask, seat)

    def _ask(self, seat: Seat) -> tuple[Found, ...]:
        """Have Ray place an actor on each node, however long that takes, and ask what is there. Raises ProbeFault, DeviceError."""
        lines = self._place(seat)
        self._lines += lines
        said = [
            (line.call("describe", place.share), line.call("whereabouts"))
            for place, line in zip(seat, lines, strict=True)
        ]
        found = []
        for place, line, (described, whereabouts) in zip(seat, lines, said, strict=True):
            gpus, notes = whereabouts.result()
            found.append(Found(place=place, line=line, described=described.result(), gpus=gpus, notes=notes))
        return tuple(found)

    def _place(self, seat: Seat) -> list[ActorLine]:
        """An actor on each node of a seat; on several all or none, so that two searches do not hold one each."""
        from ray.util import placement_group
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        group, where = None, [NodeAffinitySchedulingStrategy(place.node_id, soft=False) for place in seat]
        if len(seat) > 1:
            nodes = [{"ray.io/node-id": place.node_id} for place in seat]
            group = placement_group(
                [place.resources for place in seat], strategy="STRICT_SPREAD", bundle_label_selector=nodes
            )
            where = [PlacementGroupSchedulingStrategy(group, number) for number in range(len(seat))]
        actor = self._ray.remote(max_restarts=0, max_task_retries=0)(RayStation)
        return [
            ActorLine(
                actor.options(num_cpus=place.num_cpus, num_gpus=place.num_gpus, scheduling_strategy=there).remote(),
                place.node,
                group,
            )
            for place, there in zip(seat, where, strict=True)
        ]

    def _member(self, seat: tuple[Found, ...]) -> RemoteMember | SpreadMember:
        if len(seat) == 1:
            return self._remote(seat[0], slot_of(seat), self._host)
        parts = [self._remote(found, slot_of([found]), Host()) for found in seat]
        return SpreadMember(slot_of(seat), parts, self.world, host=self._host, address=seat[0].place.address)

    def _remote(self, found: Found, name: str, host: Host) -> RemoteMember:
        return RemoteMember(
            name,
            found.line,
            found.described.device,
            found.place.share,
            self._parcel,
            host=host,
            logs=self._logs / re.sub("[/:]", "-", name),
            import_timeout_s=self._import_timeout_s,
        )

    def _bring(self, asked: Future[tuple[Found, ...]]) -> RemoteMember | SpreadMember:
        """A slot that comes later, ready to run jobs. Raises AutotuneError where it is left out."""
        seat = asked.result()
        assert self._reference is not None
        if why := next(filter(None, (one.offer.why_not(self._reference) for one in seat)), ""):
            _close(seat)
            raise DeviceError(why)
        return self._member(seat).__enter__()

    def _look(self) -> None:
        """Look at the cluster now and then: ask for seats on new nodes, and take in the slots that have come of such."""
        if self._looking is not None and self._looking.done():
            looked, self._looking = self._looking, None
            room = self._wish.most - len(self._members) - len(self._coming) if self._wish.most is not None else None
            for seat in self._seats(looked.result())[:room] if looked.exception() is None else []:
                self._coming[seat] = self._pool.submit(self._bring, self._begin(seat))
        if self._looking is None and time.monotonic() >= self._looked_s + LOOK_S:
            self._looked_s, self._looking = time.monotonic(), self._pool.submit(self._ray.nodes)
        for seat, coming in tuple(self._coming.items()):
            if not coming.done():
                continue
            del self._coming[seat]
            try:
                member = coming.result()
            except AutotuneError as error:
                self.notes += (f"{name_of(seat)} is left out: {error}",)
                continue
            self._members[member.name] = member
            self._asked[seat] = member.name
            self._lost.pop(member.name, None)
            self._gained.append(member.name)

    def _lose(self, name: str, why: str, fault: ProbeFault | None, *tickets: int) -> SlotLost:
        """Take a slot out. Its node may give another one; where it was the last slot, that is waited for.

        Raises:
            NoSlotLeft: none has come.
        """
        self._pool.submit(self._members.pop(name).__exit__, None, None, None)
        seat = next(seat for seat, slot in self._asked.items() if slot == name)
        del self._asked[seat]
        self._losses[ids_of(seat)] += 1
        said = f"the slot {name} is taken out: {why}"
        deadline = time.monotonic() + ANOTHER_S
        while not self._members and time.monotonic() < deadline:
            self._look()
            time.sleep(LOOK_S / 10)
        if not self._members:
            raise NoSlotLeft(f"{said}; it was the last one, and the cluster has no other", tickets)
        said = f"{said}; the search goes on with {', '.join(self._members)}"
        if name not in self._members:
            self._lost[name] = said
        return SlotLost(said, name, tickets)

    def _close_lines(self) -> None:
        for line in self._lines:
            line.close()
        self._parcel = None
