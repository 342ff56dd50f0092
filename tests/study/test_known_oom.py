"""What is ruled out by what ran out of memory."""

from dataclasses import replace

import pytest

from autotune import techniques
from autotune.study.known_oom import MemoryWalls
from autotune.units import MIB
from tests.closed_form import ClosedFormRunner
from tests.rough_world import NoisyPeaks


class ManyKernels(NoisyPeaks):
    def peak(self, config, num_shapes=None):
        return replace(super().peak(config), kernels_bytes=1000 * MIB / config.batch_size)


def config(batch_size, **choices):
    return techniques.complete({"batch_size": batch_size, **choices}, global_batch=96)


@pytest.mark.parametrize("peaks", [None, NoisyPeaks(ClosedFormRunner())])
def test_the_same_techniques_at_that_batch_and_larger_ones_are_ruled_out(peaks):
    walls = MemoryWalls(peaks)
    walls.add(config(12))
    walls.add(config(24))
    assert [walls.rule_out(config(size)) for size in (8, 12, 16, 24, 48)] == [False, True, True, True, True]
    assert not walls.rule_out(config(48, amp="bf16"))


def test_a_larger_batch_is_not_where_it_needs_less_than_every_one_that_failed():
    walls = MemoryWalls(ManyKernels(ClosedFormRunner()))
    walls.add(config(1))
    assert [walls.rule_out(config(size)) for size in (1, 2, 4, 12, 24)] == [True, False, False, False, True]
    walls.add(config(2))
    assert [walls.rule_out(config(size)) for size in (1, 2, 4, 12)] == [True, True, False, True]
