"""What a process has on the card outside torch's allocator: the CUDA context, loaded kernels, libraries' handles and buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

from autotune.units import GIB, MIB

# a context and its libraries where nothing can measure them; 287 to 667 MB are published
TYPICAL_CONTEXT_BYTES = 512 * MIB
_SMALLEST_CONTEXT_BYTES, _LARGEST_CONTEXT_BYTES = 32 * MIB, 2 * GIB
_MOST_GROWTH_BYTES = 512 * MIB  # of libraries and kernels that are loaded late


@dataclass
class OutsideMemory:
    """Keeps account of it, from the best of what can be read.

    The driver's books on this process are believed if they hold at least what the allocator has reserved: in a container
    they may hold 0, or know the process by another number. Else it is the growth of the whole card's use since before the
    context, or since then plus a typical context where NVML is missing. That growth may be another process's (or hide
    behind one that still releases its memory): a first figure that no context has is replaced by a typical one, later
    growth counts up to 512 MiB, and not at all once the driver shows that others are there.

    Attributes:
        before_bytes: the card's use before this process's context; None where nothing could tell.
        peak_bytes: the most seen outside the allocator.
    """

    before_bytes: int | None = None
    peak_bytes: int = 0
    _first_bytes: int | None = field(default=None)

    def now_bytes(self, *, reserved_bytes: int, booked_bytes: int | None, card_bytes: int | None, shared: bool) -> int:
        """What lies outside the allocator now.

        Args:
            reserved_bytes: by the allocator.
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
        if self._first_bytes is None:
            grown = None if ours is None or self.before_bytes is None else ours - self.before_bytes
            believable = grown is not None and _SMALLEST_CONTEXT_BYTES <= grown <= _LARGEST_CONTEXT_BYTES
            self._first_bytes = grown if grown is not None and believable else TYPICAL_CONTEXT_BYTES
            self.before_bytes = None if ours is None else ours - self._first_bytes
        if ours is None or self.before_bytes is None or shared:
            return self._first_bytes
        grown = ours - self.before_bytes
        return min(max(grown, self._first_bytes), self._first_bytes + _MOST_GROWTH_BYTES)
