"""What NVML, or else torch, tells of one GPU: which one it is, its memory, who uses it, what slows it down. Creates no context here.

Where NVML is missing, or may number GPUs in another order, torch is asked in a separate process that ends at once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from autotune.devices import linux, nvml
from autotune.devices.base import Telemetry
from autotune.errors import DeviceError
from autotune.lazy import torch, torch_if_imported
from autotune.records.device import DeviceInfo
from autotune.units import format_bytes, plural

_SUSTAINED = "power cap"  # not a slowdown: a large GPU reaches it under any heavy load, so its speed there lasts
_PATIENCE_S = 60.0
_SIGNS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")  # NVIDIA's driver, WSL's, AMD's
_ORDER = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True, kw_only=True)
class AskedGpu:
    """A GPU as torch describes it. `uuid` lacks NVML's prefix; it is empty where the build does not tell."""

    uuid: str
    info: DeviceInfo


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The GPUs in CUDA's order, and what torch said (why there is none, say)."""

    gpus: tuple[AskedGpu, ...] = ()
    why: str = ""


_answers: dict[tuple[str | None, ...], Answer] = {}


def ask_torch() -> Answer:
    """What torch sees in this environment. The first call takes as long as importing torch, and briefly needs memory for a context."""
    key = tuple(os.environ.get(name) for name in _ORDER)
    if key not in _answers:
        _answers[key] = _ask()
    return _answers[key]


def uuid_of(index: int) -> str:
    """A GPU's UUID as torch in this process tells it, as in `AskedGpu`. That initialises CUDA, and creates no context."""
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))  # not in every ROCm build
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def describe(index: int) -> AskedGpu:
    """A GPU as torch in this process describes it. That creates a context on it."""
    told, memory = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    info = DeviceInfo(
        name=f"cuda:{index}",
        model=told.name,
        total_bytes=memory[1],
        free_bytes=memory[0],
        capability=(told.major, told.minor),
        num_multiprocessors=told.multi_processor_count,
        torch_version=metadata.version("torch"),
    )
    return AskedGpu(uuid=uuid_of(index), info=info)


def is_there_a_sign_of_a_gpu() -> bool:
    """Whether a driver's device file shows that there may be a GPU, even if NVML knows none, and none is hidden on purpose."""
    hidden = any(os.environ.get(name) == "" for name in _ORDER)
    return not hidden and any(Path(sign).exists() for sign in _SIGNS)


def _ask() -> Answer:
    environment = {name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    command = [sys.executable, "-c", "from autotune.devices import instruments; instruments.answer()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, env=environment)
        told = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        return Answer(why=f"asking torch failed: {error}"[:300])
    gpus = tuple(AskedGpu(uuid=gpu["uuid"], info=DeviceInfo.from_dict(gpu["info"])) for gpu in told["gpus"])
    return Answer(gpus=gpus, why=told["why"])


def answer() -> None:
    """Print what torch sees. This runs in the separate process."""
    gpus, why = [], ""
    with warnings.catch_warnings(record=True) as said:  # `is_available` tells by a warning why not
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                torch.cuda.init()  # before it, torch counts whole GPUs, of which CUDA may show parts (MIG)
                gpus = [asdict(describe(index)) for index in range(torch.cuda.device_count())]
        except Exception as error:
            why = str(error)
    why = why or "; ".join(str(warning.message) for warning in said)
    sys.stdout.write(json.dumps({"gpus": gpus, "why": " ".join(why.split())[:300]}) + "\n")


class Instruments:
    """Reads one GPU.

    Args:
        index: position among the devices that CUDA_VISIBLE_DEVICES leaves, in CUDA's order.
    """

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self._matches: dict[bool, nvml.Gpu] = {}  # whether this process used CUDA -> the GPU found

    def info(self) -> DeviceInfo:
        """Describe the GPU now.

        Raises:
            DeviceError: there is no such GPU, or the driver does not answer.
        """
        connection = nvml.connect()
        if isinstance(connection, str):
            return self._info_from_torch(connection)
        gpu = self.in_nvml(connection)
        memory = connection.memory(gpu)
        if memory is None:  # a GPU that shares the machine's memory
            return self._info_from_torch("its driver does not report its memory")
        used_bytes, total_bytes = memory
        return DeviceInfo(
            name=self.name,
            model=gpu.name,
            total_bytes=total_bytes,
            free_bytes=max(0, total_bytes - used_bytes),
            driver=connection.driver(),
            capability=connection.capability(gpu),
            num_multiprocessors=connection.num_multiprocessors(gpu),
            torch_version=metadata.version("torch"),
            power_limit_w=connection.power_limit_w(gpu),
            no_energy=self.why_no_energy(),
            notes=self._notes(gpu),
        )

    def telemetry(self) -> Telemetry:
        """Read the instruments now; empty if the driver does not answer."""
        if (found := self._found()) is None:
            return Telemetry()
        connection, gpu = found
        telemetry = connection.telemetry(gpu, without=_own_processes())
        if has_context() and self.booked_bytes()[0] is None:
            # the driver knows this process by another number (in a container, say), so a listed process may be this one
            telemetry = Telemetry(values=telemetry.values, throttle_reasons=telemetry.throttle_reasons)
        return telemetry

    def is_lost(self) -> bool:
        """Whether NVML says that the GPU has fallen off the bus."""
        connection = nvml.connect()
        if isinstance(connection, str):
            return False
        gpu = self._matches.get(has_context()) or self._placed(connection)
        return gpu is not None and connection.is_lost(gpu)

    def near_processors(self) -> set[int]:
        """The processors on the GPU's NUMA node that this process may run on; all of these where the node is not known."""
        allowed, found = linux.processors(), self._found()
        bus_id = "" if found is None else found[0].bus_id(found[1])
        return (linux.processors_near(bus_id) & allowed if bus_id else set()) or allowed

    def used_bytes(self) -> int | None:
        """Memory that all processes use on the card; None if nothing can tell. Before there is a context, only NVML can."""
        used_bytes = self.nvml_used_bytes()
        if used_bytes is not None or not has_context():
            return used_bytes
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._index)
        return int(total_bytes - free_bytes)

    def nvml_used_bytes(self) -> int | None:
        """The same by NVML alone, which needs no context for it."""
        memory = None if (found := self._found()) is None else found[0].memory(found[1])
        return None if memory is None else memory[0]

    def booked_bytes(self) -> tuple[int | None, bool]:
        """Memory that the driver books on this process (None if it does not say), and whether it lists more than one process."""
        booked = {} if (found := self._found()) is None else found[0].used_by_process(found[1])
        return booked.get(os.getpid()), len(booked) > 1

    def share_of_others(self, since_us: int) -> float:
        """Share of the GPU's time that other processes took since `since_us`; 0 if the driver cannot tell.

        It is also 0 where the driver lists neither this process nor a descendant: a listed process may then be this one under
        another number, as in a container.

        Args:
            since_us: microseconds since the epoch.
        """
        if (found := self._found()) is None:
            return 0.0
        own, shares = _own_processes(), found[0].utilization_by_process(found[1], since_us)
        if own.isdisjoint(shares):
            return 0.0
        return min(1.0, sum(share for pid, share in shares.items() if pid not in own))

    def why_no_energy(self) -> str:
        """Why the GPU's energy cannot be read, and what would help; empty where it can."""
        connection = nvml.connect()
        if isinstance(connection, str):
            return f"the energy of {self.name} cannot be read: {connection}"
        gpu = self.in_nvml(connection)
        if gpu.is_mig:
            return (
                f"{self.name} is a part of a GPU (MIG), whose counter is of the whole; take a whole GPU to count energy"
            )
        if connection.energy_j(gpu) is None:
            return f"the driver does not count the energy of {self.name} ({gpu.name}); it does from Volta on"
        return ""

    def counted_j(self) -> dict[str, float]:
        """What the counter of the GPU's energy reads, in joules, by the GPU's UUID; empty where it cannot be read."""
        if (found := self._found()) is None or found[1].is_mig or (joules := found[0].energy_j(found[1])) is None:
            return {}
        return {found[1].uuid: joules}

    def slowdowns(self) -> tuple[str, ...]:
        """Why the clock is now below what the GPU can sustain (heat, a weak power supply), in words."""
        if (found := self._found()) is None:
            return ()
        return tuple(reason for reason in found[0].throttle_reasons(found[1]) if reason != _SUSTAINED)

    def _found(self) -> tuple[nvml.Nvml, nvml.Gpu] | None:
        """NVML, and this GPU in it; None where NVML cannot be read or does not show the GPU."""
        connection = nvml.connect()
        try:
            return None if isinstance(connection, str) else (connection, self.in_nvml(connection))
        except DeviceError:
            return None

    def in_nvml(self, connection: nvml.Nvml) -> nvml.Gpu:
        """This GPU in NVML.

        NVML lists GPUs in the order of the bus, and CUDA may put the fastest first. So once this process uses CUDA, or where
        the machine's GPUs differ, torch is asked for the UUID. Otherwise, and where NVML does not know that UUID, the GPU at the
        same index is taken.

        Raises:
            DeviceError: NVML shows no such GPU, or it has fallen off the bus.
        """
        certain = has_context()
        if certain not in self._matches:
            self._matches[certain] = self._match(connection, certain)
        return self._matches[certain]

    def _match(self, connection: nvml.Nvml, certain: bool) -> nvml.Gpu:
        visible, placed = connection.visible_gpus(), self._placed(connection)
        if uuid := self._uuid() if certain or connection.differ() else "":
            named = [gpu for gpu in (*visible, *connection.boards()) if uuid in gpu.uuids]
            if named and placed not in named:
                return named[0]
        if placed is None:
            raise DeviceError(
                f"{self.name} is not there: the driver shows {plural(len(visible), 'GPU')}; check CUDA_VISIBLE_DEVICES"
            )
        if placed.handle is None:
            raise DeviceError(f"{self.name} has fallen off the bus, as the driver says; check nvidia-smi")
        return placed

    def _placed(self, connection: nvml.Nvml) -> nvml.Gpu | None:
        """The GPU at the same index in NVML; None where it shows fewer."""
        visible = connection.visible_gpus()
        return visible[self._index] if self._index < len(visible) else None

    def _uuid(self) -> str:
        """This GPU's UUID as torch tells it: in this process if it uses CUDA, else in another one. Empty where it does not tell."""
        if has_context():
            return uuid_of(self._index)
        return "" if (asked := self._asked()) is None else asked.uuid

    def _asked(self) -> AskedGpu | None:
        """This GPU as torch describes it: in this process if it uses CUDA, else in another one."""
        if has_context():
            return describe(self._index)
        gpus = ask_torch().gpus
        return gpus[self._index] if self._index < len(gpus) else None

    def _info_from_torch(self, why: str) -> DeviceInfo:
        """What torch tells of the GPU, where NVML does not, for the reason `why`."""
        if (asked := self._asked()) is None:
            raise DeviceError(f"{self.name} cannot be described: {why}, and torch finds no such GPU; check nvidia-smi")
        note = f"{self.name} is known from torch alone ({why}): who else uses it, and its heat, cannot be seen"
        return replace(asked.info, notes=(note,), no_energy=f"the energy of {self.name} cannot be read: {why}")

    def _notes(self, gpu: nvml.Gpu) -> tuple[str, ...]:
        notes = []
        if others := self.telemetry().processes:
            held_bytes = sum(used_bytes for _, used_bytes, _ in others)
            number = f"{len(others)} other process{'es hold' if len(others) > 1 else ' holds'}"
            notes.append(
                f"{number} {format_bytes(held_bytes)} of {self.name} and may disturb the timing; `autotune devices` names them"
            )
        if gpu.is_mig:
            notes.append(
                f"{self.name} is a MIG instance ({gpu.name}): temperature and power are those of the whole GPU"
            )
        return tuple(notes)


def has_context() -> bool:
    """Whether this process uses CUDA through torch."""
    loaded = torch_if_imported()
    return loaded is not None and bool(loaded.cuda.is_initialized())


def _own_processes() -> frozenset[int]:
    return frozenset((os.getpid(), *linux.descendants()))
