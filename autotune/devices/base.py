"""The protocol of devices: memory limit and peak, synchronization, errors, telemetry."""

from __future__ import annotations

import gc
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from autotune.devices import linux, torch_errors
from autotune.lazy import torch
from autotune.records.device import DeviceInfo

_TRITON_CAPABILITY = (7, 0)
# inductor needs one for a CPU's kernels, Triton the other to launch a GPU's: what for, the variable that names it, its usual names
_ON_CPU = "a C++ compiler on a CPU", "CXX", ("g++",)
_ON_GPU = "a C compiler on a GPU, for what launches the kernels", "CC", ("gcc", "clang")


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """The readings of the device's instruments.

    Attributes:
        values: e.g. gpu_utilization (0..100), used_bytes, temperature_c, power_w, sm_clock_mhz, load_1m; those that are
            not supported are missing.
        throttle_reasons: clock-throttle reasons that are active and slow the GPU down (thermal, power), in words.
        processes: other processes on the device: (pid, bytes used, name).
    """

    values: dict[str, float] = field(default_factory=dict)
    throttle_reasons: tuple[str, ...] = ()
    processes: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a type of device can do. Code asks these fields and never compares types. The defaults are a CPU's.

    What one device can do beyond its type is in its `DeviceInfo`; how fast it is, in its calibration.

    Attributes:
        own_memory: its memory is not the host's: batches are copied to it, and what the host holds does not count there.
        own_processors: it computes on its own processors, with other kernels, while the host's are free for other work.
        chosen_by: the environment variable that says which devices of the type a process sees; empty where there is none.
        settles_s: seconds under load until its speed is steady: power and heat settle over seconds.
        energy_window_s: seconds over which its energy has to be counted, because the counter moves in steps.
        tells_processes_apart: the memory of each process on it is always known, so that several can be measured at once.
        limits_whole_process: its memory limit bounds whatever the process holds, a compiler's memory included.
        own_allocator: torch keeps freed memory for the next tensor, and counts in `torch.cuda` what it holds.
        streams: work is queued in `torch.cuda`'s streams and timed by its events.
        page_locked: copies from page-locked memory are faster, and run beside its work.
        tf32: products in fp32 may be rounded to TF32.
        cudnn: cuDNN computes its convolutions.
        attention_kernels: torch can choose among several fused attention kernels on it.
        triton: inductor compiles for it with Triton, in several modes.
        foreach: torch's optimizers work on lists of tensors there by default.
        collectives: the backends of torch's process group where several processes train together; a GPU's have one on the host, too,
            so that decisions taken together do not wait for the GPU.
        communicator_bytes: what each of their communicators keeps of a device's own memory, outside torch's allocator: a first guess,
            where none was measured (`Communicators`); 0 where they keep none.
        saving_pays: saved memory allows larger batches, which are faster; if not, what only saves memory is searched only if asked for.
    """

    own_memory: bool = False
    own_processors: bool = False
    chosen_by: str = ""
    settles_s: float = 0.0
    energy_window_s: float = 0.1  # RAPL's counters move every millisecond
    tells_processes_apart: bool = True
    limits_whole_process: bool = True
    own_allocator: bool = False
    streams: bool = False
    page_locked: bool = False
    tf32: bool = False
    cudnn: bool = False
    attention_kernels: bool = False
    triton: bool = False
    foreach: bool = False
    collectives: str = "gloo"
    communicator_bytes: int = 0
    saving_pays: bool = False


class Device(Protocol):
    """One device. The first methods are safe anywhere and create no CUDA context; the others are for probes."""

    name: str  # `cpu`, `cuda:0`
    kind: str  # torch's name of the type, to be passed to torch; for what the type can do, ask `capabilities`
    capabilities: Capabilities

    # anywhere, also in the process that searches
    def info(self) -> DeviceInfo:
        """Describe the device now. Raises DeviceError where there is no such device."""

    def telemetry(self) -> Telemetry:
        """Read the instruments now; empty where there are none."""

    def why_no_energy(self) -> str:
        """Why the energy that it uses cannot be read, and what would help; empty where it can."""
        return f"nothing counts the energy of {self.name}"

    def is_lost(self) -> bool:
        """Whether the driver says that the device is gone: what runs on it fails, whatever that is."""
        return False

    def near_processors(self) -> set[int]:
        """Numbers of the host's processors that this process may run on, as far as they are nearest to the device."""
        return linux.processors()

    def settle(self) -> None:
        """Wait, for a few seconds at most, until the memory of ended processes is free again.

        Does nothing on a CPU, where the kernel frees it at once. `enter`, `adopt` and `synchronize` do nothing there either.
        """
        return

    # in a probe's own process
    @property
    def torch_device(self) -> torch.device:
        """The device as torch's own object."""
        return torch.device(self.name)

    def enter(self) -> None:
        """Make this the process's current device, before a model is built: user code may just say `cuda`."""
        return

    def adopt(self) -> None:
        """Accept the device as this process already uses it, without loading anything or making it current."""
        return

    def hardware_id(self) -> str:
        """Which piece of hardware this is among all of its machine, whatever each process sees; empty where processes share it by design.

        It is empty, too, where torch does not say. Call it after `enter`.
        """
        return ""

    def limit_memory(self, limit_bytes: int) -> None:
        """Make allocations fail from now on if they would take this process beyond `limit_bytes`."""

    def start_measuring(self) -> None:
        """Begin anew what `contention`, `memory_detail`, `energy_j` and `own_work` count."""

    def synchronize(self) -> None:
        """Wait for all work queued on the device."""
        return

    def peak_bytes(self) -> int:
        """The most memory that this process (with its data-loading workers) has held at once; comparable with the limit."""

    def current_bytes(self) -> int:
        """Memory of this process now, on the same scale as `peak_bytes`."""

    def kept_bytes(self) -> int:
        """The same without what an allocator holds free for later, where that is known; for growth per step.

        A heap that widens and is trimmed hides what is kept, and where it holds enough free nothing is seen of that.
        """
        return self.current_bytes()

    def outside_bytes(self) -> int:
        """Memory of this process that is not a model's, on the same scale. On a CPU, ask before a model is built.

        On a GPU it is what lies outside torch's allocator: workspaces inside are part of what the allocator reserves.
        """
        return self.current_bytes()

    @contextmanager
    def count_communicators(self, number: int) -> Iterator[None]:
        """Take note of what the first collectives of `number` groups, which run inside, take of its own memory beside tensors.

        `memory_detail` tells it. Where collectives take nothing of it, nothing is done.
        """
        yield

    def held_bytes(self, attempted_bytes: int) -> int:
        """The least that this process held when an allocation of `attempted_bytes` failed just now; comparable with the limit.

        Call it while the error's frames are alive. The result plus the attempted bytes is the least that was needed. The
        peak would overstate it, since memory held earlier may have been freed.
        """

    def is_crowded(self, attempted_bytes: int) -> bool:
        """Whether an allocation of so many bytes (0: unknown) that the limit allows failed just now because others hold the memory.

        Never on a CPU: there allocations fail by the process's own limit, and the kernel kills where the machine's memory is full.
        """
        return False

    def give_back(self) -> None:
        """Free the memory that an attempt took. Call it after the attempt; where it failed, once the error and so its frames are gone."""
        gc.collect()

    def memory_detail(self) -> dict[str, float]:
        """Further figures, in bytes or counts: on CUDA allocated, reserved, context, num_alloc_retries, num_ooms."""

    def contention(self) -> float:
        """Share of the time since `start_measuring` in which others held the processors or the GPU; 0 if unknown."""

    def energy_j(self) -> dict[str, float]:
        """Joules since `start_measuring` by counter; empty where nothing counts them. What several devices share has one name.

        Ask once a minute at least: some counters begin again at zero after a few.
        """
        return {}

    def own_work(self) -> float:
        """Share of what was computed since `start_measuring` where these counters count that is this process's; 1 if unknown."""
        return 1.0

    def slowdowns(self) -> tuple[str, ...]:
        """Why the device is now slower than it can sustain (heat, say), in words; a cap on its power does not count."""
        return ()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error`, or an error in its `__cause__`/`__context__` chain, is a failed allocation on the device or the host."""
        return torch_errors.is_out_of_memory(error, scarce=self._is_scarce)

    def is_of_host(self, error: BaseException) -> bool:
        """Whether a failed allocation was for the host's memory and not for the device's own."""
        return self.capabilities.own_memory and torch_errors.is_hosts(error)

    def _is_scarce(self) -> bool:
        """Whether the process stands at its limit, or other evidence says that memory has run short."""

    def why_not_compiled(self) -> str:
        """What `torch.compile` lacks: a compiler for host code, Python's headers, Triton for a GPU; empty where it lacks nothing."""
        if not self.capabilities.triton:
            return _no_compiler(*_ON_CPU)
        return _no_triton(self.info().capability) or _no_compiler(*_ON_GPU)


def _no_compiler(what: str, variable: str, usual: tuple[str, ...]) -> str:
    commands = (os.environ[variable],) if variable in os.environ else usual
    if not any(map(shutil.which, commands)):
        return f"torch.compile needs {what}, and there is no {' or '.join(commands)}; install one, or name one in {variable}"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"torch.compile needs Python's headers, and there is no {header}; install python3-dev"
    return ""


def _no_triton(capability: tuple[int, int]) -> str:
    if find_spec("triton") is None:
        return "torch.compile needs triton on a GPU, which is not installed"
    if (0, 0) < capability < _TRITON_CAPABILITY:
        return f"torch.compile needs compute capability 7.0, this GPU has {capability[0]}.{capability[1]}"
    return ""
