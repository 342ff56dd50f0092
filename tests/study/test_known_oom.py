"""What is ruled out by what ran out of memory."""

from autotune import techniques
from autotune.study.known_oom import KnownOom


def config(batch_size, **choices):
    return techniques.complete({"batch_size": batch_size, **choices}, global_batch=96)


def test_the_same_techniques_at_that_batch_and_larger_ones_are_ruled_out():
    oom = KnownOom([config(24), config(12)])
    assert [oom.rules_out(config(size)) for size in (8, 12, 16, 24, 48)] == [False, True, True, True, True]
    assert not oom.rules_out(config(48, amp="bf16"))


def test_nothing_is_ruled_out_where_nothing_failed():
    assert not KnownOom([]).rules_out(config(96))
