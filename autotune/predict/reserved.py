"""What CUDA's caching allocator reserves for whole training steps, over what lives in them at most."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from autotune.predict.allocator import reserved_bytes
from autotune.predict.fit import are_aligned, events_at
from autotune.predict.passes import Event, MicroSteps, Pass, Purpose, Updates

_KEYS_PER_PASS = 2**40


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
    parameters = (key for key in start.held if start.purposes[key] is Purpose.PARAMETERS)
    program = [Event(key, start.held[key], True) for key in parameters]
    offsets = itertools.count(_KEYS_PER_PASS, _KEYS_PER_PASS)
    for update in (updates.first, updates.second):
        gradients: list[Event] = []
        for events in micro_batches:
            gradients += _append(program, events, next(offsets))
        _append(program, update.events, next(offsets))
        program += [gradient._replace(allocates=False) for gradient in gradients]
    return program


def _append(program: list[Event], events: Iterable[Event], offset: int) -> list[Event]:
    """Append a pass with keys of its own, less what it frees of others'. Returns the allocations that it does not free."""
    living: dict[int, Event] = {}
    for event in events:
        if event.allocates or living.pop(event.key, None) is not None:
            own = event._replace(key=offset + event.key)
            program.append(own)
            if own.allocates:
                living[event.key] = own
    return list(living.values())


def _factor(events: Sequence[Event]) -> float:
    return reserved_bytes(events) / max(itertools.accumulate(event.change_bytes for event in events))
