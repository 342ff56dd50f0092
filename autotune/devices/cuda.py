"""A CUDA GPU (or ROCm's, which torch shows alike) as a device. `info` and `telemetry` create no context where NVML is there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from autotune.devices import linux, torch_errors
from autotune.devices.base import Capabilities, Device
from autotune.devices.instruments import Instruments, has_context, uuid_of
from autotune.errors import DeviceError, first_line
from autotune.lazy import torch
from autotune.units import GIB, MIB, format_bytes

# A library's failure is blamed on memory only where less than this is left:
_AT_LIMIT_SHARE = 0.05  # of the limit, for a workspace
_FULL_CARD_BYTES = 256 * MIB  # on the card, for kernels that libraries load
_BEFORE_LIBRARIES_BYTES = 512 * MIB  # on the card before there is a context, for that and the libraries' handles
_RELEASE_S = 2.0  # the driver frees an ended process's memory within this time
_RELEASED_BYTES = 64 * MIB  # the card's use counts as back where it was if it is no further from it
# assumed for a context and its libraries where nothing can measure them; 287 to 667 MB are published
TYPICAL_CONTEXT_BYTES = 512 * MIB
_SMALLEST_CONTEXT_BYTES, _LARGEST_CONTEXT_BYTES = 32 * MIB, 2 * GIB
_MOST_GROWTH_BYTES = 512 * MIB  # libraries and kernels that are loaded late are believed to take at most this much
_LARGEST_COMMUNICATOR_BYTES = 2 * GIB  # up to 1.6 GB are published
_NOT_TAKEN_BYTES, _NOT_TAKEN_SHARE = 64 * MIB, 0.01  # of the limit: what is missing beyond both, a neighbour has


@dataclass
class OutsideMemory:
    """Keeps account of what a process has on the card outside torch's allocator, by the best source that can be read.

    Outside are the CUDA context, loaded kernels, and libraries' handles and buffers. The driver's books on this process are
    believed if they show at least what the allocator has reserved: in a container they may show 0, or know the process by another
    number. Otherwise the growth of the whole card's use since before the context is taken; where NVML is missing, a typical context
    plus the growth since the first reading. Such growth may be another process's, or be hidden by one that is still releasing
    memory. So a first figure that is too small or too large for a context is replaced by a typical one, and later growth counts up
    to `most_growth_bytes`, or not at all once the driver shows other processes.

    Attributes:
        before_bytes: the card's use before this process's context; None where it could not be read.
        peak_bytes: the most seen outside the allocator.
        most_growth_bytes: of libraries, kernels and communicators after the first reading.
    """

    before_bytes: int | None = None
    peak_bytes: int = 0
    most_growth_bytes: int = _MOST_GROWTH_BYTES
    _first_bytes: int | None = None

    def now_bytes(self, *, reserved_bytes: int, booked_bytes: int | None, card_bytes: int | None, shared: bool) -> int:
        """What lies outside the allocator now.

        Args:
            reserved_bytes: what the allocator has reserved.
            booked_bytes: what the driver attributes to this process, or None.
            card_bytes: the card's use by all processes, or None.
            shared: whether the driver lists more than one process on the card.
        """
        if booked_bytes is not None and booked_bytes >= reserved_bytes and booked_bytes > 0:
            found = booked_bytes - reserved_bytes
        else:
            found = self._grown_bytes(reserved_bytes, card_bytes, shared)
        self.peak_bytes = max(self.peak_bytes, found)
        return found

    def _grown_bytes(self, reserved_bytes: int, card_bytes: int | None, shared: bool) -> int:
        ours = None if card_bytes is None else card_bytes - reserved_bytes
        grown = None if ours is None or self.before_bytes is None else ours - self.before_bytes
        if self._first_bytes is None:
            believable = grown is not None and _SMALLEST_CONTEXT_BYTES <= grown <= _LARGEST_CONTEXT_BYTES
            self._first_bytes = grown if grown is not None and believable else TYPICAL_CONTEXT_BYTES
            self.before_bytes = None if ours is None else ours - self._first_bytes
            return self._first_bytes
        if grown is None or shared:
            return self._first_bytes
        return min(max(grown, self._first_bytes), self._first_bytes + self.most_growth_bytes)


class CudaDevice(Instruments, Device):
    """One GPU, with the instruments of its driver.

    The limit and the peak cover everything that this process has on the card: what torch's allocator has reserved, and
    what lies outside it (`OutsideMemory`).

    Args:
        index: position among the devices that CUDA_VISIBLE_DEVICES leaves, in CUDA's order.
    """

    kind = "cuda"
    capabilities = Capabilities(
        own_memory=True,
        own_processors=True,
        collectives="cpu:gloo,cuda:nccl",
        communicator_bytes=512 * MIB,  # 544 to 688 MB were seen on four A100
        chosen_by="CUDA_VISIBLE_DEVICES",
        settles_s=2.0,
        energy_window_s=2.0,
        tells_processes_apart=False,
        limits_whole_process=False,
        own_allocator=True,
        streams=True,
        page_locked=True,
        tf32=True,
        cudnn=True,
        attention_kernels=True,
        triton=True,
        foreach=True,
        saving_pays=True,
    )

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._entered = False
        self._limit_bytes: int | None = None
        self._outside = OutsideMemory()
        self._num_communicators = self._communicators_bytes = 0
        self._rest_bytes: int | None = None  # the card's use while none of our processes runs
        self._oom_kills = linux.kernel_oom_kills()
        self._measured_since_us = time.time_ns() // 1000
        self._counted_before: dict[str, int] = {}
        self._counted_before_j: dict[str, float] = {}

    def settle(self) -> None:
        """Wait, for two seconds at most, until the card's use is back where it was before our processes ran.

        What is still held after that counts as others', and is the level to wait for the next time.
        """
        deadline = time.monotonic() + _RELEASE_S
        used_bytes = self.used_bytes()
        while used_bytes is not None and self._rest_bytes is not None and time.monotonic() < deadline:
            if used_bytes <= self._rest_bytes + _RELEASED_BYTES:
                break
            time.sleep(0.02)
            used_bytes = self.used_bytes()
        self._rest_bytes = used_bytes

    def enter(self) -> None:
        """Make this GPU the current one of the process, create a context and load what every training run loads.

        Raises:
            DeviceError: torch cannot use this GPU, because the driver is too old or torch has no kernels for it.
        """
        self._enter()
        torch.cuda.set_device(self._index)  # a session on another GPU may have come between

    def hardware_id(self) -> str:
        """The GPU's UUID."""
        return uuid_of(self._index)

    def adopt(self) -> None:
        """Accept the GPU with the context and the libraries that the process already has."""
        self._entered = True
        self.outside_bytes()

    def limit_memory(self, limit_bytes: int) -> None:
        """Make torch's allocations fail beyond the limit less this process's memory outside the allocator.

        The memory outside is measured now, with context and libraries loaded. If it grows later, only `peak_bytes` shows it. Of what
        the driver keeps for itself no process gets anything, so a limit above the rest means all of the rest.

        Raises:
            DeviceError: the context alone is larger than the limit, or torch cannot use the GPU.
        """
        outside_bytes = self.outside_bytes()
        if outside_bytes >= limit_bytes:
            raise DeviceError(
                f"a memory limit of {format_bytes(limit_bytes)} is below the {format_bytes(outside_bytes)} that CUDA "
                f"itself takes on {self.name} before training starts; raise --memory-limit"
            )
        total_bytes = torch.cuda.get_device_properties(self._index).total_memory
        fraction = min(1.0, (limit_bytes - outside_bytes) / total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, self._index)
        self._limit_bytes = min(limit_bytes, total_bytes)

    def start_measuring(self) -> None:
        """Count contention, energy, allocation retries and swallowed OOMs from now on.

        The memory peak is not reset: it covers the whole run. Retries while warming up are left out, since cuDNN's search
        for the fastest algorithm runs out of memory on purpose.
        """
        self._measured_since_us = time.time_ns() // 1000
        self._counted_before = self._counts()
        self._counted_before_j = self.counted_j()

    def synchronize(self) -> None:
        """Wait for all work queued on the GPU."""
        torch.cuda.synchronize(self._index)

    def peak_bytes(self) -> int:
        """The most that the allocator has reserved, plus the most seen outside it."""
        self.outside_bytes()
        return torch.cuda.max_memory_reserved(self._index) + self._outside.peak_bytes

    def current_bytes(self) -> int:
        """Live tensors plus what lies outside the allocator.

        Reserved memory grows by whole segments, which would hide a leak for a while.
        """
        return self.outside_bytes() + torch.cuda.memory_allocated(self._index)

    def outside_bytes(self) -> int:
        """What this process has on the card outside torch's allocator now."""
        self._enter()
        booked_bytes, shared = self.booked_bytes()
        return self._outside.now_bytes(
            reserved_bytes=torch.cuda.memory_reserved(self._index),
            booked_bytes=booked_bytes,
            card_bytes=self.used_bytes(),
            shared=shared,
        )

    @contextlib.contextmanager
    def count_communicators(self, number: int) -> Iterator[None]:
        """Take note of how much more lies outside the allocator once the first collectives of `number` groups have run inside."""
        before_bytes = self.outside_bytes()
        self._outside.most_growth_bytes += number * _LARGEST_COMMUNICATOR_BYTES
        yield
        self.synchronize()
        self._num_communicators += number
        self._communicators_bytes += max(0, self.outside_bytes() - before_bytes)

    def held_bytes(self, attempted_bytes: int) -> int:
        """What the allocator has reserved now, plus what lies outside it.

        The peak would be too high: it still counts the cached blocks that the allocator frees before it raises.
        """
        return self.outside_bytes() + torch.cuda.memory_reserved(self._index)

    def is_crowded(self, attempted_bytes: int) -> bool:
        """Whether the limit leaves this process enough for the allocation, but the card has clearly less free than that.

        Without a context this process has nothing on the card: if not even a context found room, others hold the memory.
        """
        if not self._entered:
            return True
        if self._limit_bytes is None:
            return False
        free_bytes, _ = torch.cuda.mem_get_info(self._index)
        left_bytes = self._limit_bytes - self.held_bytes(attempted_bytes)
        needless_bytes = max(_NOT_TAKEN_BYTES, _NOT_TAKEN_SHARE * self._limit_bytes)
        return attempted_bytes <= left_bytes and free_bytes < left_bytes - needless_bytes

    def give_back(self) -> None:
        """Free the attempt's memory, and give back to the card what the allocator would keep of it."""
        super().give_back()
        with contextlib.suppress(RuntimeError):  # a context that an error has broken gives nothing back
            torch.cuda.empty_cache()

    def memory_detail(self) -> dict[str, float]:
        """Peaks `allocated_bytes`, `reserved_bytes`, `outside_bytes`; since `start_measuring` `num_alloc_retries`, `num_ooms`.

        `communicators_bytes` are the part of what is outside that `num_communicators` took, as far as that could be seen.
        """
        self.outside_bytes()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self._index),
            "reserved_bytes": torch.cuda.max_memory_reserved(self._index),
            "outside_bytes": self._outside.peak_bytes,
            "num_communicators": self._num_communicators,
            "communicators_bytes": self._communicators_bytes,
            **{name: count - self._counted_before.get(name, 0) for name, count in self._counts().items()},
        }

    def contention(self) -> float:
        """Share of the GPU's time that other processes took since `start_measuring`; 0 if the driver cannot tell."""
        return self.share_of_others(self._measured_since_us)

    def energy_j(self) -> dict[str, float]:
        """Joules of the GPU since `start_measuring`, whichever process used them."""
        before_j = self._counted_before_j
        return {name: joules - before_j[name] for name, joules in self.counted_j().items() if name in before_j}

    def own_work(self) -> float:
        """Share of the GPU's time since `start_measuring` that no other process took; 1 if the driver cannot tell."""
        return 1 - self.contention()

    def is_of_host(self, error: BaseException) -> bool:
        """Whether it was for the host's memory. Failed page-locking reads like a full card, so there the card's free memory decides."""
        if super().is_of_host(error):
            return True
        with contextlib.suppress(RuntimeError):  # a broken context tells nothing
            return torch_errors.is_drivers(error) and torch.cuda.mem_get_info(self._index)[0] >= _FULL_CARD_BYTES
        return False

    def _is_scarce(self) -> bool:
        """Whether the process stands at its limit, the card is full, or the kernel has killed a process for memory.

        To find out allocates nothing: where there is no context yet, none is created.
        """
        if linux.kernel_oom_kills() > self._oom_kills:
            return True
        try:
            if not self._entered:
                return self.info().free_bytes < _BEFORE_LIBRARIES_BYTES
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._index)
            held_bytes = self.outside_bytes() + torch.cuda.max_memory_reserved(self._index)
        except (RuntimeError, DeviceError):  # the context is broken; then the error was not about memory alone
            return False
        limit_bytes = self._limit_bytes or total_bytes
        return free_bytes < _FULL_CARD_BYTES or limit_bytes - held_bytes < _AT_LIMIT_SHARE * limit_bytes

    def _enter(self) -> None:
        """Create the context and load what every training run loads, once."""
        if self._entered:
            return
        try:
            if not has_context():
                torch.cuda.init()  # takes nothing of a card, and lets torch tell in this process which GPU this is
                self._outside.before_bytes = self.nvml_used_bytes()
            torch.cuda.set_device(self._index)
            _load_libraries(self.torch_device)
        except Exception as error:
            if self.is_out_of_memory(error):  # by the evidence of this moment, which the catcher will not have
                raise torch.OutOfMemoryError(f"entering {self.name}: {first_line(error)}") from error
            raise DeviceError(
                f"torch {metadata.version('torch')} cannot use {self.name}: {first_line(error)}; update the driver or install a torch "
                "build for this GPU (https://pytorch.org/get-started/locally), or use --device cpu"
            ) from error
        self._entered = True
        self.outside_bytes()

    def _counts(self) -> dict[str, int]:
        statistics = torch.cuda.memory_stats(self._index)
        return {name: int(statistics.get(name, 0)) for name in ("num_alloc_retries", "num_ooms")}


def _load_libraries(device: torch.device) -> None:
    """Run a little of what every training run needs: a product with and without a bias (cuBLAS, cuBLASLt), a convolution (cuDNN).

    The libraries' handles and kernels lie outside the allocator; loaded later, they would add to what the limit has counted.
    """
    ones = torch.ones(16, 16, device=device, requires_grad=True)
    product = torch.nn.functional.linear(ones @ ones, ones, torch.ones(16, device=device))
    if torch.version.hip is None:  # MIOpen would search for its fastest kernel, which takes seconds
        product = torch.nn.functional.conv2d(product.view(1, 1, 16, 16), torch.ones(1, 1, 3, 3, device=device))
    torch.autograd.backward(product.sum())
    torch.cuda.synchronize(device)
