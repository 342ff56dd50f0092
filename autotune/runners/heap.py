"""Gives each process that is forked from one server a heap of its own."""

from __future__ import annotations

import random

NUM_BLOCKS = 64
BLOCK_BYTES = (600, 16_000)  # least and most: more than Python's own allocator takes, less than gets pages of its own


def stir_heap() -> list[bytes]:
    """Lay out the C heap a little differently, as in another interpreter. The caller holds what is returned as long as the process lives.

    What lies near the heap's end decides how often glibc gives memory back and takes it again, which may take from 7 to 20 % of a step.
    Interpreters differ by themselves, since Python's hashes are random; forks of one server would agree better than with any later run.
    """
    shapes = random.Random()  # of the system's randomness, whatever the seed is
    blocks = [bytes(shapes.randint(*BLOCK_BYTES)) for _ in range(NUM_BLOCKS)]
    shapes.shuffle(blocks)
    return blocks[NUM_BLOCKS // 2 :]
