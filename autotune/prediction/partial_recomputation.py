"""A micro step that recomputes some blocks of a model, put together from one that recomputes none and one that recomputes each.

A block's forward pass keeps its activations for the backward pass, or only its input. Which of the two is a matter of that
block alone, so the pieces of two traced passes, cut where blocks begin, make up every other combination. Blocks that are
recomputed together, as a segment, first run forward again one after the other, as without recomputation, and then backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from autotune.prediction.passes import Event, MicroSteps, Pass, are_aligned

Section = tuple[str, int]  # `start`, `forward`, `middle`, `backward`; the number of the block
Likeness = tuple[Section, tuple[int, int]]  # where a storage is made, and its bytes at both batch sizes
START, MIDDLE = ("start", 0), ("middle", 0)


def recompute(
    none: MicroSteps, each: MicroSteps, segments: Sequence[tuple[int, int]], num_blocks: int
) -> MicroSteps | None:
    """Micro steps that recompute some segments of the blocks.

    Args:
        none: traced without recomputation.
        each: traced with every block recomputed alone, at the same smallest and largest batch size.
        segments: (first, last + 1) block of each; other blocks are not recomputed.

    Returns:
        None where the passes cannot be cut: a block runs twice or not at all, or passes differ in more than sizes.
    """
    alone = _compose((none.alone[0], none.alone[-1]), (each.alone[0], each.alone[-1]), segments, num_blocks)
    beside = _compose(none.beside, each.beside, segments, num_blocks)
    first = _compose(none.first, each.first, segments, num_blocks) if none.first and each.first else None
    if not alone or not beside or (first is None) != (each.first is None):
        return None
    return replace(each, alone=alone, beside=beside, first=first)


def _compose(
    none: Sequence[Pass], each: Sequence[Pass], segments: Sequence[tuple[int, int]], num_blocks: int
) -> tuple[Pass, Pass] | None:
    plain, recomputing = (_cut(low, high, num_blocks) for low, high in (none, each))
    if plain is None or recomputing is None:
        return None
    recomputed = {block for first, end in segments for block in range(first, end)}
    inner = {block for first, end in segments for block in range(first, end - 1)}
    whole = {end - 1: first for first, end in segments}
    composer = _Composer(plain, recomputing, num_blocks - 1, recomputes_last=num_blocks - 1 in recomputed)
    composer.play(1, START)
    for block in range(num_blocks):
        composer.play(block in recomputed, ("forward", block))
        if block - 1 in inner:
            composer.drop_output(block - 1)
    if not composer.recomputes_last:
        composer.free_input_of_last_block()
    composer.play(1, MIDDLE)
    for block in reversed(range(num_blocks)):
        if block in whole and whole[block] < block:
            segment = range(whole[block], block + 1)
            for again in segment:
                composer.play(0, ("forward", again), kept_for=[("backward", b) for b in segment])
        composer.play(whole.get(block) == block, ("backward", block))
    return composer.result()


class _Storage(NamedTuple):
    made_in: Section
    sizes: tuple[int, int]  # bytes at both batch sizes
    freed_in: Section | None
    stream: int

    @property
    def likeness(self) -> Likeness:
        """What a storage of the other source has in common with it."""
        return self.made_in, self.sizes


@dataclass(frozen=True)
class _Source:
    """A traced pass at two batch sizes, cut into sections.

    Attributes:
        sections: the events of each.
        storages: by their keys.
        frees: section -> keys of the storages that it frees, in the order of their allocation.
    """

    low: Pass
    high: Pass
    sections: Mapping[Section, Sequence[Event]]
    storages: Mapping[int, _Storage]
    frees: Mapping[Section, Sequence[int]]


def _cut(low: Pass, high: Pass, num_blocks: int) -> _Source | None:
    """The sections of a pass; None unless every block runs once, in order, and the passes are the same in other sizes."""
    once = [*range(num_blocks + 1), *reversed(range(num_blocks))]
    if [block for _, block in low.marks] != once or low.marks != high.marks or not are_aligned(low, high):
        return None
    names = [START, *(("forward", block) for block in range(num_blocks)), MIDDLE]
    names += [("backward", block) for block in reversed(range(num_blocks))]
    edges = [0, *(position for position, _ in low.marks), len(low.events)]
    sections = {name: low.events[a:b] for name, (a, b) in zip(names, pairwise(edges), strict=True)}
    made_in = {event.key: name for name, events in sections.items() for event in events if event.allocates}
    freed_in = {event.key: name for name, events in sections.items() for event in events if not event.allocates}
    if not freed_in.keys() <= made_in.keys():
        return None
    pairs = zip(low.events, high.events, strict=True)
    sizes = {event.key: (event.size_bytes, other.size_bytes) for event, other in pairs if event.allocates}
    streams = {event.key: event.stream for event in low.events if event.allocates}
    storages = {key: _Storage(name, sizes[key], freed_in.get(key), streams[key]) for key, name in made_in.items()}
    frees: dict[Section, list[int]] = {name: [] for name in names}
    for key in storages:
        if key in freed_in:
            frees[freed_in[key]].append(key)
    return _Source(low, high, sections, storages, frees)


class _Composer:
    """Plays sections of two sources, without recomputation and with it, one after the other, as one pass."""

    def __init__(self, none: _Source, each: _Source, last_block: int, *, recomputes_last: bool) -> None:
        self.sources = (none, each)
        self.last_block, self.recomputes_last = last_block, recomputes_last
        self.events: list[tuple[int, bool]] = []  # (new key, allocates)
        self.origin: dict[int, tuple[int, int]] = {}  # new key -> (source, key there)
        self.living: dict[tuple[int, int], int] = {}  # (source, key there) -> new key
        self.next_key = max(each.low.held, default=0) + 1

    def play(self, number: int, name: Section, kept_for: Sequence[Section] | None = None) -> None:
        """Append a section of a source.

        Args:
            kept_for: where it is run again, the sections that need its results.
        """
        source, other = self.sources[number], self.sources[1 - number]
        for key, _, allocates, _ in source.sections[name]:
            if not allocates:
                self._free_or_like(number, key, name)
            elif kept_for is None or source.storages[key].freed_in in (name, *kept_for):
                self._allocate(number, key)
        if kept_for is None:
            kept = self._kept_inputs(number, name)
            for key in self._living(1 - number, name):
                likeness = other.storages[key].likeness
                if kept[likeness] > 0:
                    kept[likeness] -= 1
                else:
                    self._free(1 - number, key)

    def drop_output(self, block: int) -> None:
        """Free what a block's forward pass hands to the next one and keeps no longer than until then."""
        for key in self._living(1, ("backward", block + 1)):
            if self.sources[1].storages[key].made_in == ("forward", block):
                self._free(1, key)

    def free_input_of_last_block(self) -> None:
        """Free what the last block was given and, without recomputation, does not keep: that is done after its forward pass."""
        for key in self.sources[0].frees[MIDDLE]:
            if self.sources[0].storages[key].made_in not in (MIDDLE, ("forward", self.last_block)):
                self._free_or_like(0, key, MIDDLE)

    def _kept_inputs(self, number: int, name: Section) -> Counter[Likeness]:
        """What a block's forward pass takes from the other source and keeps for its backward pass, where that source frees it."""
        if name[0] != "forward" and not (name == MIDDLE and self.recomputes_last):
            return Counter()
        later = "backward", self._block_of(name)
        source, other = self.sources[number], self.sources[1 - number]
        mine = (key for key in source.frees[later] if (number, key) not in self.living)
        kept = Counter(source.storages[key].likeness for key in mine)
        return kept - Counter(other.storages[key].likeness for key in self._living(1 - number, later))

    def _free_or_like(self, number: int, key: int, name: Section) -> None:
        """Free a storage where it lives, else one of the other source that is like it and is freed in the same section.

        Else it is a block's input that the other source frees in the other pass of that block: a block that is recomputed keeps
        its input for the backward pass, and the same block without recomputation may not.
        """
        if (number, key) in self.living:
            self._free(number, key)
            return
        storage, other, block = self.sources[number].storages[key], self.sources[1 - number], self._block_of(name)
        is_input = storage.made_in != ("forward", block)
        for section in (name, ("backward", block), ("forward", block)) if is_input else (name,):
            for like in self._living(1 - number, section):
                if other.storages[like].likeness == storage.likeness:
                    self._free(1 - number, like)
                    return

    def _block_of(self, name: Section) -> int:
        """The block whose input a section frees: what follows the last block's forward pass frees what that was given."""
        return self.last_block if name == MIDDLE else name[1]

    def _living(self, number: int, name: Section) -> list[int]:
        """The living storages of a source that a section of it frees."""
        return [key for key in self.sources[number].frees[name] if (number, key) in self.living]

    def _allocate(self, number: int, key: int) -> None:
        self.living[number, key] = self.next_key
        self.origin[self.next_key] = number, key
        self.events.append((self.next_key, True))
        self.next_key += 1

    def _free(self, number: int, key: int) -> None:
        self.events.append((self.living.pop((number, key)), False))

    def result(self) -> tuple[Pass, Pass]:
        """The pass at both batch sizes."""
        storages = {new: self.sources[number].storages[key] for new, (number, key) in self.origin.items()}
        each = self.sources[1]
        low, high = (
            replace(
                base,
                events=tuple(
                    Event(new, storages[new].sizes[which], allocates, storages[new].stream)
                    for new, allocates in self.events
                ),
                purposes={key: base.purposes[key] for key in base.held} | self._of_origin("purposes"),
                modules=self._of_origin("modules"),
                marks=(),
                work=None,
            )
            for which, base in enumerate((each.low, each.high))
        )
        return low, high

    def _of_origin(self, attribute: str) -> dict[int, Any]:
        known = [getattr(source.low, attribute) for source in self.sources]
        return {new: known[number][key] for new, (number, key) in self.origin.items() if key in known[number]}
