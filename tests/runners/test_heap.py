"""Processes that are forked from one server do not share the shape of its heap."""

from __future__ import annotations

from autotune.runners.heap import BLOCK_BYTES, NUM_BLOCKS, stir_heap


def test_half_of_the_blocks_stay_and_they_are_others_each_time() -> None:
    first, second = stir_heap(), stir_heap()
    assert len(first) == len(second) == NUM_BLOCKS // 2
    assert {len(block) for block in first} != {len(block) for block in second}
    assert all(BLOCK_BYTES[0] <= len(block) <= BLOCK_BYTES[1] for block in first)


def test_what_stays_is_too_little_to_count_as_memory_of_the_training() -> None:
    assert sum(map(len, stir_heap())) < 2**19
