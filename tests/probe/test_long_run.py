"""How far memory grows in a long run, where something is kept for each shape of a micro batch."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from autotune import Task
from autotune.devices import open_device
from autotune.devices.cpu import CpuDevice
from autotune.probe import measure
from autotune.probe.measure import Run
from autotune.records.config import ProbeSettings
from autotune.session import prepare

LARGE_BYTES = 40 * 2**20


@pytest.fixture(autouse=True)
def no_block_lies_in_what_other_tests_freed():
    """Fills the holes of this process's heap, which would take the blocks without any growth."""
    device, fillings = open_device("cpu"), []
    for num_bytes in (LARGE_BYTES, LARGE_BYTES // 4):
        has_grown = False
        while not has_grown:
            before_bytes = device.current_bytes()
            fillings.append(torch.empty(num_bytes, dtype=torch.uint8))
            has_grown = device.current_bytes() >= before_bytes + num_bytes
    yield
    fillings.clear()


class Lines(torch.utils.data.Dataset):
    """200 samples of so many different lengths."""

    def __init__(self, num_lengths):
        self.num_lengths = num_lengths

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.ones(index % self.num_lengths + 20, 6)


def long_run_of(keep, num_lengths=200, batch_size=1, sample_s=measure.MIN_BLOCK_S, num_steps=20, device=None):
    """What a probe tells where `keep` takes note of each batch."""

    def training_step(model, batch):
        time.sleep(sample_s * len(batch))  # each block is one step
        keep(batch)
        return model(batch).mean()

    task = Task(
        build_model=lambda: nn.Linear(6, 3),
        train_dataset=lambda: Lines(num_lengths),
        training_step=training_step,
        collate_fn=lambda lines: nn.utils.rnn.pad_sequence(lines, batch_first=True),
    )
    device = device or open_device("cpu")
    settings = ProbeSettings(memory_limit_bytes=None, max_timed_s=0.2, num_steps=num_steps, interval=0.0001)
    session = prepare(task, {"batch_size": batch_size}, device=device)
    found = Run(session, device, settings, lambda progress: None).measure(0.0)
    assert found.num_shapes > (5 if num_steps > 5 else 1)
    return found


def test_what_is_cached_for_each_shape_is_expected_to_go_on_growing():
    cached = {}
    found = long_run_of(lambda batch: cached.setdefault(batch.shape, bytearray(LARGE_BYTES)))
    assert found.long_run_growth_bytes > 100 * 2**20
    assert found.long_run_peak_bytes == found.peak_bytes + found.long_run_growth_bytes
    assert long_run_of(lambda batch: None).long_run_growth_bytes == 0


class OwnMemory(CpuDevice):
    """One with memory of its own, where an allocator holds more than is in use."""

    capabilities = replace(CpuDevice.capabilities, own_memory=True)


def test_growth_by_shape_is_told_only_where_memory_is_the_hosts():
    cached = {}
    found = long_run_of(lambda batch: cached.setdefault(batch.shape, bytearray(LARGE_BYTES)), device=OwnMemory())
    assert found.growth_bytes_per_step > 10 * 2**20 and found.growth_bytes_per_shape == 0 == found.long_run_growth_bytes


def long_run_with_a_cache(num_lengths):
    cached = {}
    return long_run_of(lambda batch: cached.setdefault(batch.shape, bytearray(LARGE_BYTES)), num_lengths)


def test_growth_is_expected_to_end_with_the_last_shape_that_the_training_set_has():
    # in a process of its own, as a probe is: the peak is not that of other tests
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as process:
        found = process.submit(long_run_with_a_cache, 40).result()
    num_left = 40 - found.num_shapes
    assert found.long_run_growth_bytes == pytest.approx(num_left * LARGE_BYTES, rel=0.2, abs=1)


def test_where_batches_are_few_and_large_small_ones_show_what_a_new_shape_takes():
    cached = {}
    found = long_run_of(
        lambda batch: cached.setdefault(batch.shape, bytearray(LARGE_BYTES)),
        batch_size=8,
        sample_s=0.05,
        num_steps=2,
    )
    assert found.growth_bytes_per_shape == pytest.approx(LARGE_BYTES, rel=0.1)
    assert found.long_run_growth_bytes > 100 * 2**20
    assert not long_run_of(lambda batch: None, batch_size=8, sample_s=0.05, num_steps=2).growth_bytes_per_shape


def test_small_batches_that_take_less_for_each_shape_are_followed_by_whole_ones():
    cached, sizes = {}, []

    def keep(batch):
        sizes.append(len(batch))
        cached.setdefault(batch.shape, bytearray(len(batch) * LARGE_BYTES // 8))

    found = long_run_of(keep, batch_size=8, sample_s=0.05, num_steps=2)
    assert sizes[-1] == 2 and 8 in sizes[sizes.index(2) :]  # a leak is looked for with small ones
    assert found.growth_bytes_per_shape == pytest.approx(LARGE_BYTES, rel=0.1)


def test_a_leak_is_no_cache_and_a_small_one_hides_none():
    leaked, losses, cached = [], [], {}
    found = long_run_of(lambda batch: leaked.append(torch.empty(LARGE_BYTES, dtype=torch.uint8)))
    assert found.leaks and found.growth_bytes_per_step > 10 * 2**20 and found.long_run_growth_bytes == 0

    def keep_both(batch):
        losses.append(batch.sum())
        cached.setdefault(batch.shape, bytearray(LARGE_BYTES))

    for few in ({}, {"batch_size": 8, "sample_s": 0.05, "num_steps": 2}):
        cached.clear()
        found = long_run_of(keep_both, **few)
        assert found.leaks and found.long_run_growth_bytes > 100 * 2**20
