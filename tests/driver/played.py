"""What tests change and read while processes run over the driver: neighbours, instruments, faults, and who holds what.

The layout is that of `Books` in `played.h`; a version word at the start of the file keeps the two together. What holds for a
process's whole life is a setting in its environment instead (`cards.py`, `settings.c`).
"""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path

VERSION = 2
MAX_DEVICES = 8
MAX_PROCESSES = 256

ILLEGAL_ADDRESS = 700
UNCORRECTABLE_ECC = 214
LAUNCH_FAILURE = 719
DEVICE_ASSERT = 710
UNKNOWN = 999


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_int32),
        ("launches", ctypes.c_uint32),
        ("started", ctypes.c_uint64),
        ("died_ns", ctypes.c_int64),
        ("busy_ns", ctypes.c_uint64),
        ("held_bytes", ctypes.c_uint64 * MAX_DEVICES),
        ("context_bytes", ctypes.c_uint64 * MAX_DEVICES),
    )


class _Card(ctypes.Structure):
    _fields_ = (
        ("neighbour_bytes", ctypes.c_uint64),
        ("throttle_reasons", ctypes.c_uint64),
        ("energy_mj", ctypes.c_uint64),
        ("work_nj", ctypes.c_uint64),
        ("energy_read_ns", ctypes.c_int64),
        ("power_mw", ctypes.c_uint32),
        ("temperature_c", ctypes.c_uint32),
        ("utilization", ctypes.c_uint32),
        ("memory_utilization", ctypes.c_uint32),
        ("error", ctypes.c_uint32),
        ("is_neighbour_known", ctypes.c_uint32),
    )


class _Books(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("linger_ns", ctypes.c_int64),
        ("pinnable_bytes", ctypes.c_uint64),
        ("launches_until_error", ctypes.c_int64),
        ("launch_error", ctypes.c_uint32),
        ("without_cudnn_plan", ctypes.c_uint32),
        ("cards", _Card * MAX_DEVICES),
        ("processes", _Process * MAX_PROCESSES),
    )


class Played:
    """A hand on the cards that the processes with this state file see.

    Args:
        state: the file that PLAYED_STATE names; it is made where it is missing.

    Raises:
        RuntimeError: the file is another version's.
    """

    def __init__(self, state: Path) -> None:
        size = ctypes.sizeof(_Books)
        with state.open("a+b") as file:
            file.truncate(size)
            self._books = _Books.from_buffer(mmap.mmap(file.fileno(), size))
        self._books.version = self._books.version or VERSION
        self._books.size = self._books.size or size
        if (self._books.version, self._books.size) != (VERSION, size):
            raise RuntimeError(
                f"{state} is of version {self._books.version} with {self._books.size} bytes, expected {VERSION} with {size}: "
                "take a new file, and keep played.py and played.h alike"
            )

    # ---- who holds what

    def used_bytes(self, device: int = 0) -> int:
        """Memory of a card in use: all processes and the neighbour."""
        held = (p.held_bytes[device] + p.context_bytes[device] for p in self._books.processes if self._is_booked(p))
        return int(self._books.cards[device].neighbour_bytes + sum(held))

    def processes(self, device: int = 0) -> dict[int, int]:
        """Bytes of each live process that has a context on a card, the context included."""
        alive = [p for p in self._books.processes if p.context_bytes[device] and _is_alive(p)]
        return {p.pid: p.held_bytes[device] + p.context_bytes[device] for p in alive}

    def launches(self) -> dict[int, int]:
        """How many kernels, products and collectives each live process has launched."""
        return {p.pid: p.launches for p in self._books.processes if _is_alive(p)}

    def busy_s(self) -> dict[int, float]:
        """Time of the cards that each live process has asked for."""
        return {p.pid: p.busy_ns / 1e9 for p in self._books.processes if _is_alive(p)}

    # ---- neighbours and instruments

    def set_neighbour(self, num_bytes: int, device: int = 0) -> None:
        """Let others hold so much of a card; NVML lists them as the process with the number 1."""
        self._books.cards[device].neighbour_bytes = num_bytes
        self._books.cards[device].is_neighbour_known = 1

    def set_throttle_reasons(self, bits: int, device: int = 0) -> None:
        """Set NVML's bits of why the clock is low."""
        self._books.cards[device].throttle_reasons = bits

    def set_power_w(self, watts: float, device: int = 0) -> None:
        """Let a card draw so much from now on, whatever it does, which its total energy follows."""
        card, now_ns = self._books.cards[device], time.monotonic_ns()
        if card.power_mw:
            card.energy_mj += int((now_ns - card.energy_read_ns) / 1e9 * card.power_mw)
        card.energy_read_ns = now_ns
        card.power_mw = round(watts * 1000)

    def set_temperature_c(self, celsius: int, device: int = 0) -> None:
        """Set what the card's sensor reads."""
        self._books.cards[device].temperature_c = celsius

    def set_utilization(self, gpu_percent: int, memory_percent: int, device: int = 0) -> None:
        """Set how busy NVML says that a card is; before, that follows from whether a process uses it."""
        self._books.cards[device].utilization = gpu_percent + 1
        self._books.cards[device].memory_utilization = memory_percent + 1

    # ---- faults

    def fail_launch(self, number: int = 1, error: int = ILLEGAL_ADDRESS) -> None:
        """Let a launch break its process's context for good.

        Args:
            number: which launch from now on, over all processes.
            error: what CUDA says from then on, as late as on a card: some calls further on.
        """
        self._books.launch_error = error
        self._books.launches_until_error = number

    def take_off_bus(self, device: int = 0, error: int = UNKNOWN) -> None:
        """Let a card fall off the bus: processes on it get `error`, new ones no context, NVML says that the card is lost."""
        self._books.cards[device].error = error

    def put_on_bus(self, device: int = 0) -> None:
        """Bring the card back, as after a reset, for processes that begin now."""
        self._books.cards[device].error = 0

    def limit_pinned_bytes(self, num_bytes: int) -> None:
        """Let each process page-lock no more than so much."""
        self._books.pinnable_bytes = max(1, num_bytes)

    def remove_cudnn_plans(self) -> None:
        """Let cuDNN support no graph of operations."""
        self._books.without_cudnn_plan = 1

    def hold_after_death_s(self, seconds: float) -> None:
        """Let the memory of a dead process stay held for so long after it was first seen dead."""
        self._books.linger_ns = round(seconds * 1e9)

    def _is_booked(self, process: _Process) -> bool:
        if process.pid <= 0:
            return False
        if _is_alive(process):
            return True
        process.died_ns = process.died_ns or time.monotonic_ns()
        return bool(time.monotonic_ns() - process.died_ns < self._books.linger_ns)


def _is_alive(process: _Process) -> bool:
    if process.pid <= 0:
        return False
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and int(fields[19]) == process.started
