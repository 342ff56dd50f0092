"""Others on the processors are seen; this process's own threads are not taken for others."""

import os
import sys
import threading
import time

import pytest
import torch

from autotune.devices import open_device
from autotune.devices.contention import ProcessorWatch
from tests.devices.processes import CONTEXT, in_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")


def hog(core):
    os.sched_setaffinity(0, {core})
    while True:
        pass


def work(seconds):
    matrix = torch.ones(128, 128)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        matrix @ matrix


def contention_on_core(core, num_threads):
    """What is seen of others, and the share of the core that this process did not get, which it always wants."""
    os.sched_setaffinity(0, {core})
    device = open_device("cpu")
    work(0.1)  # the first products take what is no work
    device.start_measuring()
    began_s, used_s = time.monotonic(), time.process_time()
    threads = [threading.Thread(target=work, args=(0.6,)) for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    work(0.6)
    share = device.contention()
    lacked = 1 - (time.process_time() - used_s) / (time.monotonic() - began_s)
    for thread in threads:
        thread.join()
    return share, lacked


def test_an_equal_process_on_the_same_core_is_seen_and_nothing_but_what_others_take():
    core = min(os.sched_getaffinity(0))
    lone, lone_lacked = in_process(contention_on_core, core, 1)
    other = CONTEXT.Process(target=hog, args=(core,), daemon=True)
    other.start()
    try:
        crowded, crowded_lacked = in_process(contention_on_core, core, 1)
    finally:
        other.kill()
        other.join()
    assert 0.2 < crowded < 1
    assert crowded == pytest.approx(crowded_lacked, abs=0.1)
    assert lone == pytest.approx(lone_lacked, abs=0.1)  # whoever else is on this machine


def test_threads_that_wait_for_threads_of_their_own_process_are_not_contention():
    share, lacked = in_process(contention_on_core, min(os.sched_getaffinity(0)), 4)
    assert share < lacked + 0.1  # though each waits three quarters of the time


def test_a_thread_that_ended_does_not_disturb_the_measurement():
    device = open_device("cpu")
    before = threading.Thread(target=work, args=(0.05,))
    before.start()
    device.start_measuring()
    before.join()
    during = threading.Thread(target=work, args=(0.05,))
    during.start()
    during.join()
    assert 0 <= device.contention() <= 1


def write_ticks(proc, busy, stolen):
    lines = [f"cpu{core} {busy} 0 0 1000 0 0 0 {stolen} 0 0" for core in os.sched_getaffinity(0)]
    (proc / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines]))


def test_time_that_a_hypervisor_gave_to_others_counts(tmp_path):
    write_ticks(tmp_path, busy=100, stolen=10)
    watch = ProcessorWatch(proc=tmp_path)
    write_ticks(tmp_path, busy=400, stolen=110)
    assert watch.share(1) == pytest.approx(0.25)


def test_a_kernel_that_counts_nothing_gives_zero(tmp_path):
    assert ProcessorWatch(proc=tmp_path).share(1) == 0
