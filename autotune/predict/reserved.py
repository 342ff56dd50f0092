"""What CUDA's caching allocator reserves for whole training steps, over what lives in them at most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autotune.predict.allocator import allocator_peak
from autotune.predict.fit import are_aligned, events_at
from autotune.predict.passes import Event, MicroSteps, Pass, Purpose, Updates

_KEYS_PER_REPLAY = 2**40


def reserved_factors(
    micro: MicroSteps, updates: Updates, batch_sizes: Sequence[int]
) -> tuple[tuple[int, float, float], ...]:
    """(batch size, factor with one micro batch a step, factor with more).

    Args:
        micro: traced for CUDA.
        updates: with the task's optimizer as it is.
        batch_sizes: wanted; where the passes are not aligned it is the two that were traced.
    """
    both = (micro.alone[0], micro.alone[-1]), micro.beside
    aligned = all(are_aligned(low, high) for low, high in both)
    found = []
    for size in batch_sizes if aligned else [traced.batch_size for traced in micro.beside]:
        if aligned:
            alone, beside = (events_at(size, low, high) for low, high in both)
        else:
            alone, beside = (next(p.events for p in passes if p.batch_size == size) for passes in both)
        one, more = (_two_steps(micro.alone[0], passes, updates) for passes in ([alone], [alone, beside]))
        found.append((size, _factor(one), _factor(more)))
    return tuple(found)


def _two_steps(start: Pass, micro_batches: Sequence[Sequence[Event]], updates: Updates) -> list[Event]:
    """A program as a probe's: the model, a step that allocates the optimizer's state in between, and another step."""
    program = _Program()
    program.replay(
        Event(key, size_bytes, True)
        for key, size_bytes in start.held.items()
        if start.purposes[key] is Purpose.PARAMETERS
    )
    for update in (updates.first, updates.second):
        before = len(program.events)
        for events in micro_batches:
            program.replay(events)
        gradients = program.living_since(before)
        program.replay(update.events)
        program.free(gradients)
    return program.events


class _Program:
    """Passes one after the other as one sequence of events. A pass's keys are its own, each time it is replayed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._num_replays = 0

    def replay(self, events: Iterable[Event]) -> None:
        """Append a pass. What it frees and did not allocate belongs to others, and is left to them."""
        self._num_replays += 1
        offset = self._num_replays * _KEYS_PER_REPLAY
        own = set()
        for key, size_bytes, allocates in events:
            if allocates:
                own.add(key)
            elif key not in own:
                continue
            self.events.append(Event(offset + key, size_bytes, allocates))

    def living_since(self, position: int) -> list[Event]:
        """The allocations since a position that are not freed yet."""
        living: dict[int, Event] = {}
        for event in self.events[position:]:
            if event.allocates:
                living[event.key] = event
            else:
                living.pop(event.key, None)
        return list(living.values())

    def free(self, allocations: Iterable[Event]) -> None:
        """Free them."""
        self.events += [Event(key, size_bytes, False) for key, size_bytes, _ in allocations]


def _factor(events: Sequence[Event]) -> float:
    living = peak = 0
    for change in _changes(events):
        living += change
        peak = max(peak, living)
    return allocator_peak(events).reserved_bytes / peak


def _changes(events: Iterable[Event]) -> Iterator[int]:
    return (size_bytes if allocates else -size_bytes for _, size_bytes, allocates in events)
