"""How much memory CUDA's caching allocator takes from the card to serve a program's allocations.

It follows `c10/cuda/CUDACachingAllocator.cpp` of PyTorch with its default settings, for one stream:

- a request is rounded up to 512 B;
- requests of up to 1 MiB are served from segments of 2 MiB (the small pool), others (the large pool) from segments of
  20 MiB or, from 10 MiB on, of the request rounded up to 2 MiB;
- a free block is taken by best fit: the smallest that is large enough, of those the one at the lowest address;
- a block that is larger than asked for is split if 512 B are left (small pool) or more than 1 MiB (large pool);
- a freed block is joined with the free blocks beside it in its segment, and segments are kept.

Where a limit is near, it gives segments without a living block back first: a program then gets by with less, at a cost in time.
Segments are taken to lie one behind the other in the order in which they were made.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.predict.passes import Event
from autotune.units import MIB

_MIN_BLOCK_BYTES = 512  # kMinBlockSize
_SMALL_BYTES = 1 * MIB  # kSmallSize
_SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
_LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
_OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc
_SEGMENT_ROUNDING_BYTES = 2 * MIB  # kRoundLarge


def reserved_bytes(events: Iterable[Event]) -> int:
    """What `torch.cuda.max_memory_reserved` would report after the same allocations.

    Args:
        events: allocations and freeings in program order. Storages without bytes take no memory.
    """
    allocator = _CachingAllocator()
    living: dict[int, _Block] = {}
    for key, size_bytes, allocates in events:
        if allocates and size_bytes > 0:
            living[key] = allocator.allocate(size_bytes)
        elif key in living and not allocates:
            allocator.free(living.pop(key))
    return allocator.reserved_bytes


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment, linked with the pieces before and after it in the same segment."""

    address: int
    size_bytes: int
    pool: _Pool
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class _Pool:
    """The free blocks of the small or of the large pool, ordered by size and then by address."""

    def __init__(self, smallest_rest_bytes: int) -> None:
        self.smallest_rest_bytes = smallest_rest_bytes
        self._order: list[tuple[int, int]] = []
        self._blocks: dict[int, _Block] = {}

    def put(self, block: _Block) -> None:
        block.free = True
        insort(self._order, (block.size_bytes, block.address))
        self._blocks[block.address] = block

    def take(self, block: _Block) -> None:
        del self._order[bisect_left(self._order, (block.size_bytes, block.address))]
        del self._blocks[block.address]
        block.free = False

    def take_best_fit(self, size_bytes: int) -> _Block | None:
        index = bisect_left(self._order, (size_bytes, 0))
        if index == len(self._order):
            return None
        block = self._blocks[self._order[index][1]]
        self.take(block)
        return block


class _CachingAllocator:
    def __init__(self) -> None:
        self.reserved_bytes = 0  # segments lie behind each other, and are kept
        self._small = _Pool(smallest_rest_bytes=_MIN_BLOCK_BYTES)
        self._large = _Pool(smallest_rest_bytes=_SMALL_BYTES + 1)

    def allocate(self, request_bytes: int) -> _Block:
        """A block for the request."""
        size_bytes = _round_up(request_bytes, _MIN_BLOCK_BYTES)
        pool = self._small if size_bytes <= _SMALL_BYTES else self._large
        block = pool.take_best_fit(size_bytes) or self._new_segment(_segment_bytes(size_bytes), pool)
        if block.size_bytes - size_bytes >= pool.smallest_rest_bytes:
            _split(block, size_bytes)
        return block

    def free(self, block: _Block) -> None:
        """Give a block back to its pool, joined with its free neighbours."""
        before, after = block.before, block.after
        if before is not None and before.free:
            block.pool.take(before)
            block.address = before.address
            block.size_bytes += before.size_bytes
            _link(before.before, block)
        if after is not None and after.free:
            block.pool.take(after)
            block.size_bytes += after.size_bytes
            _link(block, after.after)
        block.pool.put(block)

    def _new_segment(self, size_bytes: int, pool: _Pool) -> _Block:
        block = _Block(self.reserved_bytes, size_bytes, pool)
        self.reserved_bytes += size_bytes
        return block


def _split(block: _Block, size_bytes: int) -> None:
    """Cut a block down to `size_bytes` and put the rest into the pool."""
    rest = _Block(block.address + size_bytes, block.size_bytes - size_bytes, block.pool)
    _link(rest, block.after)
    _link(block, rest)
    block.size_bytes = size_bytes
    block.pool.put(rest)


def _link(before: _Block | None, after: _Block | None) -> None:
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before


def _segment_bytes(size_bytes: int) -> int:
    if size_bytes <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size_bytes < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return _round_up(size_bytes, _SEGMENT_ROUNDING_BYTES)


def _round_up(size_bytes: int, multiple_bytes: int) -> int:
    return -(-size_bytes // multiple_bytes) * multiple_bytes
