"""What a traced training step asks of the allocator, in program order."""

from __future__ import annotations

from typing import NamedTuple


class Event(NamedTuple):
    """One storage allocated or freed.

    Attributes:
        key: the same for the allocation and the freeing of one storage, and never used again.
        size_bytes: the storage's own size, before an allocator rounds it.
        allocates: True when it is allocated, False when it is freed.
    """

    key: int
    size_bytes: int
    allocates: bool
