"""A micro step that recomputes some blocks of a model, put together from one that recomputes none and one that recomputes each.

A block's forward pass keeps its activations for the backward pass, or only its input. Which of the two is a matter of that
block alone, so the pieces of two traced passes, cut where blocks begin, make up every other combination. Blocks that are
recomputed together, as a segment, first run forward again one after the other, as without recomputation, and then backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autotune.prediction.fit import are_aligned
from autotune.prediction.passes import Event, MicroSteps, Pass

Section = tuple[str, int]  # `start`, `forward`, `middle`, `backward`; the number of the block
Likeness = tuple[Section, tuple[int, int]]
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
    return MicroSteps(alone=alone, beside=beside, before=each.before) if alone and beside else None


def _compose(
    none: Sequence[Pass], each: Sequence[Pass], segments: Sequence[tuple[int, int]], num_blocks: int
) -> tuple[Pass, Pass] | None:
    sources = [_Source(*pair) for pair in (none, each)]
    if not all(source.can_be_cut(num_blocks) for source in sources):
        return None
    recomputed = {block for first, end in segments for block in range(first, end)}
    composer = _Composer(sources[0], sources[1], num_blocks - 1, recomputes_last=num_blocks - 1 in recomputed)
    inner = {block for first, end in segments for block in range(first, end - 1)}
    whole = {end - 1: first for first, end in segments}
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


@dataclass(frozen=True)
class _Source:
    """A traced pass at two batch sizes, cut into sections."""

    low: Pass
    high: Pass

    def can_be_cut(self, num_blocks: int) -> bool:
        """Whether every block runs once, in order, and the passes are the same in other sizes."""
        blocks = [block for _, block in self.low.marks]
        return (
            blocks == [*range(num_blocks + 1), *reversed(range(num_blocks))]
            and self.low.marks == self.high.marks
            and are_aligned(self.low, self.high)
            and all(event.key in self.sizes for event in self.low.events)
        )

    @cached_property
    def sections(self) -> dict[Section, tuple[Event, ...]]:
        """The events of each section."""
        positions = [position for position, _ in self.low.marks]
        num_blocks = len(positions) // 2
        names = [START, *(("forward", block) for block in range(num_blocks)), MIDDLE]
        names += [("backward", block) for block in reversed(range(num_blocks))]
        edges = [0, *positions, len(self.low.events)]
        return {name: self.low.events[a:b] for name, a, b in zip(names, edges[:-1], edges[1:], strict=True)}

    @cached_property
    def made_in(self) -> dict[int, Section]:
        """Key of a storage -> the section that allocates it."""
        return {event.key: name for name, events in self.sections.items() for event in events if event.allocates}

    @cached_property
    def freed_in(self) -> dict[int, Section]:
        """Key of a storage -> the section that frees it."""
        return {event.key: name for name, events in self.sections.items() for event in events if not event.allocates}

    def likeness(self, key: int) -> Likeness:
        """Where a storage is made, and its bytes at both batch sizes."""
        return self.made_in[key], self.sizes[key]

    @cached_property
    def sizes(self) -> dict[int, tuple[int, int]]:
        """Key of a storage -> its bytes at both batch sizes."""
        pairs = zip(self.low.events, self.high.events, strict=True)
        return {low.key: (low.size_bytes, high.size_bytes) for low, high in pairs if low.allocates}


class _Composer:
    """Plays sections of two sources one after the other, as one pass."""

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
        source = self.sources[number]
        for key, _, allocates in source.sections[name]:
            if allocates:
                freed_in = source.freed_in.get(key)
                if kept_for is None or freed_in == name or freed_in in kept_for:
                    self._allocate(number, key)
            elif (number, key) in self.living:
                self._free(number, key)
            elif (like := self._counterpart(number, key, name)) is not None:
                self._free(*like)
        if kept_for is None:
            other, kept = 1 - number, self._kept_inputs(number, name)
            for key in [key for n, key in self.living if n == other and self.sources[n].freed_in.get(key) == name]:
                likeness = self.sources[other].likeness(key)
                if kept[likeness] > 0:
                    kept[likeness] -= 1
                else:
                    self._free(other, key)

    def drop_output(self, block: int) -> None:
        """Free what a block's forward pass hands to the next one and keeps no longer than until then."""
        each, span = self.sources[1], (("forward", block), ("backward", block + 1))
        for key in [key for n, key in self.living if n == 1 and (each.made_in[key], each.freed_in.get(key)) == span]:
            self._free(1, key)

    def free_input_of_last_block(self) -> None:
        """Free what the last block was given and, without recomputation, does not keep: that is done after its forward pass."""
        none = self.sources[0]
        for key in [key for key, freed_in in none.freed_in.items() if freed_in == MIDDLE]:
            if none.made_in[key] in (MIDDLE, ("forward", self.last_block)):
                continue
            if (0, key) in self.living:
                self._free(0, key)
            elif (like := self._counterpart(0, key, MIDDLE)) is not None:
                self._free(*like)

    def _kept_inputs(self, number: int, name: Section) -> Counter[Likeness]:
        """What a block's forward pass takes from the other source and keeps for its backward pass, where that source frees it."""
        if name[0] != "forward" and not (name == MIDDLE and self.recomputes_last):
            return Counter()
        later = "backward", self._block_of(name)
        source, other = self.sources[number], self.sources[1 - number]
        mine = (key for key, freed_in in source.freed_in.items() if freed_in == later)
        kept = Counter(source.likeness(key) for key in mine if (number, key) not in self.living)
        theirs = (key for n, key in self.living if n != number and other.freed_in.get(key) == later)
        return kept - Counter(map(other.likeness, theirs))

    def _counterpart(self, number: int, key: int, name: Section) -> tuple[int, int] | None:
        """A living storage of the other source that is like one of this source, and is freed in the same section.

        Else it is a block's input that the other source frees in the other pass of that block: a block that is recomputed keeps
        its input for the backward pass, and the same block without recomputation may not.
        """
        source, other = self.sources[number], self.sources[1 - number]
        alike = [k for n, k in self.living if n != number and other.likeness(k) == source.likeness(key)]
        block = self._block_of(name)
        is_input = source.made_in[key] != ("forward", block)
        sections = (name, ("backward", block), ("forward", block)) if is_input else (name,)
        found = (k for section in sections for k in alike if other.freed_in.get(k) == section)
        return next(((1 - number, k) for k in found), None)

    def _block_of(self, name: Section) -> int:
        """The block whose input a section frees: what follows the last block's forward pass frees what that was given."""
        return self.last_block if name == MIDDLE else name[1]

    def _allocate(self, number: int, key: int) -> None:
        self.living[number, key] = self.next_key
        self.origin[self.next_key] = number, key
        self.events.append((self.next_key, True))
        self.next_key += 1

    def _free(self, number: int, key: int) -> None:
        self.events.append((self.living.pop((number, key)), False))

    def result(self) -> tuple[Pass, Pass]:
        """The pass at both batch sizes."""
        sizes = {new: self.sources[number].sizes[key] for new, (number, key) in self.origin.items()}
        low, high = (
            replace(
                base,
                events=tuple(Event(new, sizes[new][which], allocates) for new, allocates in self.events),
                purposes={key: base.purposes[key] for key in base.held} | self._of_origin("purposes"),
                modules=self._of_origin("modules"),
                marks=(),
                work=None,
            )
            for which, base in enumerate((self.sources[1].low, self.sources[1].high))
        )
        return low, high

    def _of_origin(self, attribute: str) -> dict[int, Any]:
        known = [getattr(source.low, attribute) for source in self.sources]
        return {new: known[number][key] for new, (number, key) in self.origin.items() if key in known[number]}
