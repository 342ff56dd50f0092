"""A machine's GPUs on paper, as driver and torch show them to one process after another, in all the ways seen in the field.

What the driver of `tests/driver` plays is tested over it (`test_cuda.py`, `tests/gpu`). It keeps right books, lists every
process, and does not sample what each takes of a card: books as of containers and WSL, neighbours that are hidden or busy, and
whole searches that step through them in milliseconds are here. NVML is `fake_nvml`'s; of `torch.cuda` the functions that
autotune uses stand in, over `autotune.prediction.allocator`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.devices import cuda, instruments
from autotune.prediction.allocator import _Block, _CachingAllocator
from autotune.units import GIB, MIB
from tests.devices.fake_nvml import FakeNvml, install

CONTEXT_BYTES = 420 * MIB
HOST_PID = 31_337
NEIGHBOUR_PID = 4242


@dataclass
class Neighbour:
    """Another process on a card; `grows` is called whenever somebody reads the card, and says what it holds then."""

    used_bytes: int = 0
    utilization: int = 0
    pid: int = NEIGHBOUR_PID
    grows: Callable[[], int] | None = None


@dataclass
class Card:
    """A physical GPU, or a MIG instance, with `fake_nvml`'s attributes.

    Attributes:
        books: how the driver lists the process that trains: `right`, `zero` bytes, `none` for its bytes, under its `host pid`,
            or in an `empty list` (others are hidden, too).
        releasing: bytes that an ended process still holds, by how often the card is read until they are gone.
        driver_bytes: what the driver keeps: NVML counts it as used, and CUDA neither as used nor in the total.
    """

    uuid: str = "GPU-11111111"
    name: str = "NVIDIA H200"
    total_bytes: int = 140 * GIB
    capability: tuple[int, int] = (9, 0)
    books: str = "right"
    reasons: int = 0
    neighbours: list[Neighbour] = field(default_factory=list)
    instances: list[Card] = field(default_factory=list)
    board: Card | None = None
    releasing: list[int] = field(default_factory=list)
    process: Process | None = None
    utilization: int | None = 90
    temperature_c: int | None = 60
    power_mw: int | None = 300_000
    lost: bool = False
    driver_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """Read the card: time goes by."""
        held = self.releasing.pop(0) if self.releasing else 0
        for neighbour in self.neighbours:
            if neighbour.grows is not None:
                neighbour.used_bytes = neighbour.grows()
        return held + self.driver_bytes + self.others_bytes + (self.process.held_bytes if self.process else 0)

    @property
    def others_bytes(self) -> int:
        return sum(neighbour.used_bytes for neighbour in self.neighbours)

    @property
    def processes(self) -> list[tuple[int, int | None]]:
        if self.books == "empty list":
            return []
        listed: list[tuple[int, int | None]] = [(n.pid, n.used_bytes) for n in self.neighbours]
        if self.process is not None and self.process.context:
            pid = HOST_PID if self.books == "host pid" else os.getpid()
            held = {"zero": 0, "none": None}.get(self.books, self.process.held_bytes)
            listed.append((pid, held))
        return listed

    @property
    def process_utilization(self) -> list[tuple[int, int]]:
        if self.books == "empty list":
            return []
        own = [(HOST_PID if self.books == "host pid" else os.getpid(), 60)] if self.process else []
        return own + [(n.pid, n.utilization) for n in self.neighbours if n.utilization]


class Process:
    """The process that trains: whether it uses CUDA, its context and what its torch holds on one card."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.uses_cuda = self.context = False
        self.outside_bytes = 0
        self.allowed_bytes = card.total_bytes
        self.allocated_bytes = self.most_allocated_bytes = self.most_reserved_bytes = 0
        self.counts = {"num_alloc_retries": 0, "num_ooms": 0}
        self._allocator = _CachingAllocator()
        self._blocks: dict[int, tuple[_Block, int]] = {}
        card.process = self

    @property
    def reserved_bytes(self) -> int:
        return self._allocator.reserved_bytes

    @property
    def held_bytes(self) -> int:
        return self.reserved_bytes + self.outside_bytes

    def create_context(self) -> None:
        if self.card.total_bytes - self.card.used_bytes < CONTEXT_BYTES:
            raise RuntimeError("CUDA error: out of memory")
        self.uses_cuda = self.context = True
        self.outside_bytes = CONTEXT_BYTES

    def allocate(self, size_bytes: int) -> int:
        """A key of the memory.

        Raises:
            torch.OutOfMemoryError: the limit, or the card, has not so much left.
        """
        before = self.reserved_bytes
        block = self._allocator.allocate(size_bytes)
        more = self.reserved_bytes - before
        if more and (
            self.reserved_bytes > self.allowed_bytes or more > self.card.total_bytes - self.card.used_bytes + more
        ):
            self._allocator.reserved_bytes = before  # what failed never was; this process allocates no more
            self.counts["num_ooms"] += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size_bytes / GIB:.2f} GiB. GPU 0 has a total capacity of "
                f"{self.card.total_bytes / GIB:.2f} GiB of which 1.00 MiB is free."
            )
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        self.allocated_bytes += block.size_bytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        self._blocks[id(block)] = block, block.size_bytes
        return id(block)

    def free(self, key: int) -> None:
        block, size_bytes = self._blocks.pop(key)
        self.allocated_bytes -= size_bytes
        self._allocator.free(block)

    def end(self, *, releases_in: int = 0) -> None:
        """Give everything back, or after so many looks at the card."""
        self.card.releasing = [self.held_bytes] * releases_in
        self.card.process = None


_FUNCTIONS = (
    "init",
    "is_initialized",
    "device_count",
    "set_device",
    "synchronize",
    "get_device_properties",
    "mem_get_info",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_stats",
    "set_per_process_memory_fraction",
)


class Machine:
    """GPUs, and the `torch.cuda` of the process that trains on one of them.

    Args:
        cards: in the order of the bus, as NVML numbers them.
        cuda_order: their positions in the order in which CUDA numbers them.
        nvml_error: makes NVML fail.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *cards: Card,
        cuda_order: tuple[int, ...] | None = None,
        nvml_error: Exception | None = None,
    ) -> None:
        self.cards = cards
        install(monkeypatch, *cards, error=nvml_error)  # type: ignore[arg-type]
        visible = [next(iter(card.instances), card) for card in cards]
        self.visible = [visible[place] for place in cuda_order or range(len(cards))]
        self.process: Process | None = None
        self.process_of(0)
        for name in _FUNCTIONS:
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(self.visible))
        monkeypatch.setattr(cuda, "_load_libraries", lambda device: self._process().create_context())
        told = tuple(instruments.describe(index) for index in range(len(self.visible)))
        monkeypatch.setattr(instruments, "_answers", {})
        monkeypatch.setattr(instruments, "_ask", lambda: instruments.Answer(gpus=told))

    def process_of(self, index: int, *, releases_in: int = 0) -> Process:
        """End the process that trained, and begin another one on CUDA's GPU `index`, without a context yet."""
        if self.process is not None:
            self.process.end(releases_in=releases_in)
        self.process = Process(self.visible[index])
        return self.process

    def _process(self, index: int | None = None) -> Process:
        assert self.process is not None
        return self.process

    def _init(self) -> None:
        self._process().uses_cuda = True

    def _is_initialized(self) -> bool:
        return self._process().uses_cuda

    def _set_device(self, index: int) -> None: ...

    def _synchronize(self, index: int) -> None: ...

    def _device_count(self) -> int:
        return len(self.visible)

    def _memory_reserved(self, index: int) -> int:
        return self._process().reserved_bytes

    def _max_memory_reserved(self, index: int) -> int:
        return self._process().most_reserved_bytes

    def _memory_allocated(self, index: int) -> int:
        return self._process().allocated_bytes

    def _max_memory_allocated(self, index: int) -> int:
        return self._process().most_allocated_bytes

    def _memory_stats(self, index: int) -> dict[str, Any]:
        return dict(self._process().counts)

    def _mem_get_info(self, index: int) -> tuple[int, int]:
        card = self.visible[index]
        return card.total_bytes - card.used_bytes, card.total_bytes - card.driver_bytes

    def _get_device_properties(self, index: int) -> Any:
        card = self.visible[index]
        major, minor = card.capability
        bare = card.uuid.removeprefix("GPU-").removeprefix("MIG-")
        return SimpleNamespace(
            name=card.name,
            uuid=bare,
            major=major,
            minor=minor,
            total_memory=card.total_bytes - card.driver_bytes,
            multi_processor_count=132,
        )

    def _set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        card = self.visible[index]
        self._process().allowed_bytes = int(fraction * (card.total_bytes - card.driver_bytes))


NO_NVML = FakeNvml.NVMLError_LibraryNotFound("NVML Shared Library Not Found")
