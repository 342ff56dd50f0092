"""A device as plain data: what it is, where on it jobs run, and its rates, measured before any task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autotune.records.formats import Record

FP32, TF32, BF16, FP16, FP8 = "fp32", "tf32", "bf16", "fp16", "fp8"
MATMUL, CONVOLUTION = "matmul", "convolution"
CALLED = {MATMUL: "matrix products", CONVOLUTION: "convolutions"}


def same_memory(first_bytes: int, second_bytes: int) -> bool:
    """Whether two readings of total memory can come from one device: at each boot the kernel keeps a few pages more or less."""
    return abs(first_bytes - second_bytes) <= 0.01 * max(first_bytes, second_bytes)


@dataclass(frozen=True, kw_only=True)
class DeviceInfo(Record):
    """A device as plain data.

    Attributes:
        name: as the user writes it: `cpu`, `cuda:0`.
        model: the hardware's name, e.g. `NVIDIA H200` or the processor's model name.
        total_bytes: memory of the device (on a CPU: of the machine or its cgroup, whichever is smaller).
        free_bytes: memory that a new process may take now.
        num_threads: compute threads torch uses on a CPU; 0 on a GPU.
        driver: GPU driver version; empty on a CPU.
        capability: CUDA compute capability, (0, 0) on a CPU.
        num_multiprocessors: streaming multiprocessors of a GPU, 0 on a CPU and where it is not known.
        torch_version: version of the torch that measures.
        power_limit_w: the limit that is enforced on a GPU now; 0 where it is not known.
        no_energy: why the energy that it uses cannot be read, and what would help; empty where it can.
    """

    name: str
    model: str
    total_bytes: int
    free_bytes: int
    num_threads: int = 0
    driver: str = ""
    capability: tuple[int, int] = (0, 0)
    num_multiprocessors: int = 0
    torch_version: str = ""
    power_limit_w: float = 0.0
    no_energy: str = ""
    notes: tuple[str, ...] = ()  # warnings, e.g. other processes on the GPU

    @property
    def kind(self) -> str:
        """torch's name for the device's type; `autotune.devices.capabilities_of` tells what the type can do."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Slot(Record):
    """A place for one job at a time.

    Attributes:
        name: the runner's name for it, unique among the runner's slots: `cpu`, `cuda:1`.
        device: the device that a job trains on there, as it is now.
    """

    name: str
    device: DeviceInfo


@dataclass(kw_only=True)
class Work:
    """What operators do, counted.

    Attributes:
        flops: (kind of work, type) -> FLOPs of matrix products and convolutions.
        moved_bytes: bytes that operators read and write, as if there were no caches.
        plain_bytes: the part of `moved_bytes` by operators without such FLOPs: elementwise ones, norms, copies.
        num_operators: number of operators, without those that only make a view of a tensor.
        wire_bytes: collective -> bytes that it puts together or hands to all, of the whole and not of one process's part.
    """

    flops: dict[tuple[str, str], float] = field(default_factory=dict)
    moved_bytes: float = 0.0
    plain_bytes: float = 0.0
    num_operators: int = 0
    wire_bytes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rate(Record):
    """How fast a device does one kind of work in one type.

    Attributes:
        work: `matmul` (square matrices) or `convolution` (3x3, forward and backward).
        arithmetic: the type.
        sizes: rows of the matrices, or channels; rising, as far as there was time.
        flops_per_s: rate at each size, the best of several runs; empty where not even the smallest ended.
        failure: why a larger size failed, or gave no answer in time; empty where none was tried, or memory was short.
    """

    work: str
    arithmetic: str
    sizes: tuple[int, ...] = ()
    flops_per_s: tuple[float, ...] = ()
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Calibration(Record):
    """The measured rates of a device. What is missing was not measured; an empty record stands for "not measured".

    Attributes:
        bytes_per_s: bandwidth of its memory, reading and writing together, by a copy too large for the caches.
        launch_s: seconds from one small operator to the next.
        host_to_device_bytes_per_s: rate of copies from page-locked memory; None on a CPU.
        allocation_s: seconds to allocate and free a block.
        of: what the rates hold for: device, driver, torch, power limit, threads, variables of the environment.
        measured_at: the time in ISO 8601; empty where nothing was measured.
        wall_s: seconds that measuring took.
        contention: share of the time in which others held the processors or the GPU.
    """

    rates: tuple[Rate, ...] = ()
    bytes_per_s: float | None = None
    launch_s: float | None = None
    host_to_device_bytes_per_s: float | None = None
    allocation_s: float | None = None
    of: dict[str, str] = field(default_factory=dict)
    measured_at: str = ""
    wall_s: float = 0.0
    contention: float = 0.0

    def rate(self, work: str, arithmetic: str) -> Rate | None:
        """The rate of a kind of work in a type; None where it was not tried."""
        return next((rate for rate in self.rates if (rate.work, rate.arithmetic) == (work, arithmetic)), None)

    def best(self, work: str, arithmetic: str) -> float | None:
        """The highest rate seen, in FLOP/s."""
        rate = self.rate(work, arithmetic)
        return max(rate.flops_per_s, default=None) if rate else None

    def gain(self, work: str, arithmetic: str) -> float | None:
        """The best rate in a type over fp32's best, at sizes measured for both. 0 where the type failed at all of them, None if unknown."""
        rate, plain = self.rate(work, arithmetic), self.rate(work, FP32)
        if rate is None or plain is None or not plain.sizes:
            return None
        at, plain_at = (dict(zip(one.sizes, one.flops_per_s, strict=True)) for one in (rate, plain))
        common = at.keys() & plain_at.keys()
        if not common:
            return 0.0 if rate.failure else None
        return max(at[size] for size in common) / max(plain_at[size] for size in common)


NOT_MEASURED = Calibration()


@dataclass(frozen=True, kw_only=True)
class Communicators(Record):
    """What the library of collectives holds of a device's memory in each process of a world, outside torch's allocator.

    It holds some for each communicator, which a group of processes makes with its first collective. The default stands for devices
    of which it holds nothing, and for one process.

    Attributes:
        guess_bytes: of one communicator, where none was measured.
        measured: (number of communicators, bytes of all of them together), by their number: the most that was seen.
        of: what the measured figures hold for (`autotune.devices.calibration.communicators_hold_for`).
    """

    guess_bytes: int = 0
    measured: tuple[tuple[int, int], ...] = ()
    of: dict[str, str] = field(default_factory=dict)

    def is_measured(self, number: int) -> bool:
        """Whether the bytes of so many are a measured figure; else they are an estimate."""
        return number in dict(self.measured)

    def bytes_of(self, number: int) -> int:
        """Bytes of so many. Where that number was not measured, each is taken to hold what the largest does that was."""
        if (known := dict(self.measured).get(number)) is not None:
            return known
        return number * max((num_bytes // count for count, num_bytes in self.measured), default=self.guess_bytes)

    def seen(self, number: int, num_bytes: int) -> Communicators:
        """The same once so many were seen to hold `num_bytes`. Less than before is no news, and 0 says that nothing could be read."""
        known = dict(self.measured)
        if num_bytes <= known.get(number, 0):
            return self
        return replace(self, measured=tuple(sorted((known | {number: num_bytes}).items())))


NO_COMMUNICATORS = Communicators()
