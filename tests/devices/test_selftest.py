"""The doctor's tests of a CPU, in real processes."""

import sys

import pytest
import torch

from autotune.devices import selftest
from autotune.doctor import verdicts
from tests.devices.processes import in_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU device needs Linux's /proc")


def with_many_threads(test):
    torch.set_num_threads(48)  # whose stacks are larger than what a test lets the process take
    return test("cpu")


def test_a_cpus_memory_ends_at_its_limit_however_many_threads_compute():
    facts = in_process(with_many_threads, selftest.memory_limit)
    assert verdicts.judge_limit(facts)[0] is verdicts.State.OK, facts
    assert verdicts.judge_recognition(facts)[0] is verdicts.State.OK, facts


def test_a_cpus_peak_grows_by_what_is_allocated_however_many_threads_compute():
    facts = in_process(with_many_threads, selftest.books)
    assert verdicts.judge_peak(facts)[0] is verdicts.State.OK, facts
