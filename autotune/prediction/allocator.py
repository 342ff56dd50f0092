"""How much memory CUDA's caching allocator takes from the card to serve a program's allocations, and whole training steps'.

It follows `c10/cuda/CUDACachingAllocator.cpp` of PyTorch, with its default settings unless the environment has others:

- a request is rounded up to 512 B;
- requests of up to 1 MiB are served from segments of 2 MiB (the small pool), others (the large pool) from segments of
  20 MiB or, from 10 MiB on, of the request rounded up to 2 MiB;
- a free block is taken by best fit: the smallest that is large enough, of those the one at the lowest address;
- a block that is larger than asked for is split if 512 B are left (small pool) or more than 1 MiB (large pool);
- a freed block is joined with the free blocks beside it in its segment, and segments are kept;
- each stream has pools of its own. Not followed: a block that another stream uses is free only when that stream is done.

Of the settings, `expandable_segments` makes each pool one segment that grows by 2 or 20 MiB, `max_split_size_mb` keeps large blocks
whole, and `roundup_power2_divisions` (one number for all sizes) rounds requests up.

Near a limit torch first gives back segments without a living block, so that a program needs less, at a cost in time; this is not followed.
Segments are taken to lie one behind the other in the order in which they were made.
"""

from __future__ import annotations

import itertools
import os
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.devices.allocator_settings import settings_in
from autotune.devices.kernels.rules import Stepped, round_up
from autotune.prediction import Array
from autotune.prediction.passes import Event, MicroSteps, Updates, are_aligned
from autotune.prediction.traces import Group, Reserved
from autotune.units import MIB

_MIN_BLOCK_BYTES = 512  # kMinBlockSize
_SMALL_BYTES = 1 * MIB  # kSmallSize
_SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
_LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer
_OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc
_SEGMENT_ROUNDING_BYTES = 2 * MIB  # kRoundLarge
_KEYS_PER_PASS = 2**40


def reserved_bytes(events: Iterable[Event], added: str = "", held_bytes: Sequence[int] = ()) -> int:
    """What `torch.cuda.max_memory_reserved` would report after the same allocations.

    Args:
        events: allocations and freeings in program order. Storages without bytes take no memory.
        added: to the settings of the environment, in their own form.
        held_bytes: what libraries hold from the allocator, before and after.
    """
    return _Program.of(events, held_bytes).reserved_bytes(settings_of(os.environ, added))


def reserved_factors(
    micro: MicroSteps,
    updates: Mapping[Group, Updates],
    living_bytes: Callable[[Group, int, bool], float],
    batch_sizes: Sequence[int],
    added: Sequence[str],
    held_bytes: Sequence[int] = (),
) -> tuple[Reserved, ...]:
    """What the allocator takes, as a multiple of the most that lives at once, with each of several updates and settings.

    What the allocator takes is exact at each batch size, even where what lives is estimated: the factor is the one over the other.

    Args:
        micro: traced for CUDA.
        updates: by the techniques that act on the optimizer.
        living_bytes: by these, the batch size, and whether there are several micro batches in a step.
        batch_sizes: wanted; where the passes are not aligned it is the two that were traced.
        added: to the settings of the environment, one by one.
        held_bytes: as of `reserved_bytes`.
    """
    seen: dict[tuple[object, ...], tuple[tuple[int, float, float], ...]] = {}

    def factors(group: Group, settings: Settings) -> tuple[tuple[int, float, float], ...]:
        changes = (tuple(event.change_bytes for event in each.events) for each in updates[group])
        if (key := (settings, *changes)) not in seen:
            seen[key] = tuple(
                (
                    size,
                    one.reserved_bytes(settings) / living_bytes(group, size, False),
                    more.reserved_bytes(settings) / living_bytes(group, size, True),
                )
                for size, (one, more) in _programs_by_size(micro, updates[group], batch_sizes, held_bytes).items()
            )
        return seen[key]

    return tuple(
        Reserved(added=text, factors=factors(group, settings_of(os.environ, text)), update=group)
        for group in updates
        for text in added
    )


def _programs_by_size(
    micro: MicroSteps, updates: Updates, batch_sizes: Sequence[int], held_bytes: Sequence[int]
) -> dict[int, list[_Program]]:
    """Batch size -> programs with one micro batch a step, and with more."""

    def programs(alone: Sequence[Event], *several: Sequence[Event]) -> list[_Program]:
        steps = (_two_steps(micro, micro_batches, updates) for micro_batches in ((alone,), several))
        return [_Program.of(events, held_bytes) for events in steps]

    first = micro.first or micro.alone
    small, large = (micro.alone[0], first[0], micro.beside[0]), (micro.alone[-1], first[-1], micro.beside[-1])
    of_small = programs(*(traced.events for traced in small))
    low, high = small[0].batch_size, large[0].batch_size
    if not all(map(are_aligned, small, large)):
        return {low: of_small, high: programs(*(traced.events for traced in large))}
    pairs = [zip(a.events, b.events, strict=True) for a, b in zip(small, large, strict=True)]
    of_large = programs(
        *([a._replace(size_bytes=b.size_bytes) for a, b in pair] for pair in pairs)
    )  # the same storages
    shares = {size: (size - low) / (high - low) for size in batch_sizes}
    return {
        size: [a.towards(b, share) for a, b in zip(of_small, of_large, strict=True)] for size, share in shares.items()
    }


def _two_steps(micro: MicroSteps, micro_batches: Sequence[Sequence[Event]], updates: Updates) -> list[Event]:
    """A program as a probe's: the model, a step that allocates the optimizer's state in between, and another step."""
    program = list(micro.before)
    offsets = itertools.count(_KEYS_PER_PASS, _KEYS_PER_PASS)
    if micro.spread:
        rehearsed = _append(program, micro_batches[0], next(offsets))
        program += [gradient._replace(allocates=False) for gradient in rehearsed]
        program += micro.spread
    for between, update in (((), updates.first), (micro.regrouped, updates.second)):
        program += between
        gradients: list[Event] = []
        for events in micro_batches:
            gradients += _append(program, events, next(offsets))
        _append(program, update.events, next(offsets))
        program += [gradient._replace(allocates=False) for gradient in gradients]
    return program


def _append(program: list[Event], events: Iterable[Event], offset: int) -> list[Event]:
    """Append a pass with keys of its own, without freeing what others allocated. Returns the allocations that it does not free."""
    living: dict[int, Event] = {}
    for event in events:
        if event.allocates or living.pop(event.key, None) is not None:
            own = event._replace(key=offset + event.key)
            program.append(own)
            if own.allocates:
                living[event.key] = own
    return list(living.values())


@dataclass(frozen=True)
class _Program:
    """Allocations and freeings in program order, as columns.

    Attributes:
        places: numbers of the storages, from 0 on.
        sizes: bytes of each, which are whole numbers.
        allocates: or frees.
        streams: on which each is allocated.
        held_bytes: what libraries hold from the allocator, before and after.
        stepped: row -> its sizes, where these do not lie on a line in the batch size.
    """

    places: list[int]
    sizes: Array
    allocates: list[bool]
    streams: list[int]
    held_bytes: tuple[int, ...]
    stepped: dict[int, Stepped]

    @classmethod
    def of(cls, events: Iterable[Event], held_bytes: Sequence[int] = ()) -> _Program:
        """The same as columns."""
        numbers: dict[int, int] = {}
        rows = [(numbers.setdefault(key, len(numbers)), *others) for key, *others in events]
        places, sizes, allocates, streams = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
        stepped = {number: size for number, size in enumerate(sizes) if isinstance(size, Stepped)}
        return cls(places, np.array(sizes, dtype=float), allocates, streams, tuple(held_bytes), stepped)

    def towards(self, other: _Program, share: float) -> _Program:
        """The same storages; at a share of 0 with this program's sizes, at 1 with the other's, else on the line through both."""
        sizes = np.rint(self.sizes + share * (other.sizes - self.sizes))
        for row, stepped in self.stepped.items():
            sizes[row] = stepped.towards(other.stepped[row], share)
        return replace(self, sizes=sizes)

    def reserved_bytes(self, settings: Settings) -> int:
        """What the allocator takes."""
        allocator = _CachingAllocator(settings_of(os.environ))
        for size_bytes in self.held_bytes:
            allocator.allocate(size_bytes)
        if self.held_bytes:  # small tensors that made the libraries load are gone, and their segment is kept
            allocator.free(allocator.allocate(_MIN_BLOCK_BYTES))
        allocator.set(settings)
        rounded = [_rounded(size, settings.divisions) if size > 0 else 0 for size in map(int, self.sizes.tolist())]
        living: list[_Block | None] = [None] * len(self.places)
        for place, size_bytes, allocates, stream in zip(
            self.places, rounded, self.allocates, self.streams, strict=True
        ):
            if allocates:
                if size_bytes:
                    living[place] = allocator.allocate_rounded(size_bytes, stream)
            elif (block := living[place]) is not None:
                allocator.free(block)
                living[place] = None
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


@dataclass(frozen=True)
class Settings:
    """Of the caching allocator, as far as they change what it takes from the card."""

    expandable: bool = False
    max_split_bytes: int | None = None
    divisions: int = 1  # of each power of two, to which requests are rounded up


def settings_of(environment: Mapping[str, str], added: str = "") -> Settings:
    """Read the settings in the environment, and those that are added to them."""
    text = ",".join(filter(None, (settings_in(environment), added)))
    given = dict(re.findall(r"(\w+):(\w+)", text))
    split_mib, divisions = given.get("max_split_size_mb", ""), given.get("roundup_power2_divisions", "")
    return Settings(
        expandable="expandable_segments:True" in text.replace(" ", ""),
        max_split_bytes=int(split_mib) * MIB if split_mib.isdigit() else None,
        divisions=int(divisions) if divisions.isdigit() else 1,
    )


class _Pool:
    """The free blocks of the small or of the large pool, ordered by size and then by address.

    Attributes:
        page_bytes: size of a segment that several requests share, and the step by which an expandable segment grows.
        last: the block at the end of an expandable segment.
        end: its end; segments that do not grow lie behind each other.
    """

    def __init__(self, smallest_rest_bytes: int, page_bytes: int) -> None:
        self.smallest_rest_bytes = smallest_rest_bytes
        self.page_bytes = page_bytes
        self.last: _Block | None = None
        self.end = 0
        self.max_split_bytes: int | None = None
        self._free: list[tuple[int, int, _Block]] = []  # no two at one address, so blocks are never compared

    def put(self, block: _Block) -> None:
        block.free = True
        insort(self._free, (block.size_bytes, block.address, block))

    def take(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, (block.size_bytes, block.address))]
        block.free = False

    def take_best_fit(self, size_bytes: int) -> _Block | None:
        index = bisect_left(self._free, (size_bytes, 0))
        if index == len(self._free):
            return None
        if self._free[index][2] is self.last and index + 1 < len(self._free):
            index += 1  # the end of a segment that grows counts as large as that may become
        block, limit = self._free[index][2], self.max_split_bytes
        if limit is not None and block.size_bytes >= (
            limit if size_bytes < limit else size_bytes + _LARGE_SEGMENT_BYTES
        ):
            return None
        self.take(block)
        return block


class _CachingAllocator:
    def __init__(self, settings: Settings = Settings()) -> None:
        self.reserved_bytes = 0  # segments are kept
        self._pools: dict[int, tuple[_Pool, _Pool]] = {}  # small and large, by stream
        self._settings = settings

    def set(self, settings: Settings) -> None:
        """Change the settings from now on, as techniques do once a context and its libraries are there."""
        self._settings = settings
        for _, large in self._pools.values():
            self._set_up(large)

    def _set_up(self, large: _Pool) -> None:
        large.smallest_rest_bytes = _MIN_BLOCK_BYTES if self._settings.expandable else _SMALL_BYTES + 1
        large.max_split_bytes = self._settings.max_split_bytes

    def _pools_of(self, stream: int) -> tuple[_Pool, _Pool]:
        if stream not in self._pools:
            large = _Pool(_SMALL_BYTES + 1, _LARGE_SEGMENT_BYTES)
            self._pools[stream] = _Pool(_MIN_BLOCK_BYTES, _SMALL_SEGMENT_BYTES), large
            self._set_up(large)
        return self._pools[stream]

    def allocate(self, request_bytes: int) -> _Block:
        return self.allocate_rounded(_rounded(request_bytes, self._settings.divisions))

    def allocate_rounded(self, size_bytes: int, stream: int = 0) -> _Block:
        small, large = self._pools_of(stream)
        pool = small if size_bytes <= _SMALL_BYTES else large
        block = pool.take_best_fit(size_bytes)
        if block is None:
            block = self._reserve(pool, size_bytes)
        kept_whole = pool.max_split_bytes is not None and size_bytes >= pool.max_split_bytes
        if not kept_whole and block.size_bytes - size_bytes >= pool.smallest_rest_bytes:
            _split(block, size_bytes)
        return block

    def _reserve(self, pool: _Pool, size_bytes: int) -> _Block:
        """A new segment, or the end of the pool's only one, which grows by as much as it is too small."""
        block = _Block(pool.end, 0, pool)
        is_large = size_bytes >= _OWN_SEGMENT_BYTES
        more_bytes = round_up(size_bytes, _SEGMENT_ROUNDING_BYTES) if is_large else pool.page_bytes
        if self._settings.expandable:
            if pool.last is not None and pool.last.free:
                block = pool.last
                pool.take(block)
            else:
                _link(pool.last, block)
                pool.last = block
            more_bytes = round_up(size_bytes - block.size_bytes, pool.page_bytes)
        block.size_bytes += more_bytes
        pool.end += more_bytes
        self.reserved_bytes += more_bytes
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
            if block.pool.last is after:
                block.pool.last = block
        block.pool.put(block)


def _split(block: _Block, size_bytes: int) -> None:
    """Cut a block down to `size_bytes` and put the rest into the pool."""
    rest = _Block(block.address + size_bytes, block.size_bytes - size_bytes, block.pool)
    _link(rest, block.after)
    _link(block, rest)
    block.size_bytes = size_bytes
    if block.pool.last is block:
        block.pool.last = rest
    block.pool.put(rest)


def _link(before: _Block | None, after: _Block | None) -> None:
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before


def _rounded(request_bytes: int, divisions: int) -> int:
    """A request rounded up to 512 B, or where it is larger to a division of its power of two."""
    if divisions <= 1 or request_bytes <= _MIN_BLOCK_BYTES * divisions:
        return round_up(request_bytes, _MIN_BLOCK_BYTES)
    return round_up(request_bytes, 2 ** (request_bytes.bit_length() - 1) // divisions)
