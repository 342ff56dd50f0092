"""How far memory grows in a long run, where something is kept for each shape of a micro batch."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.backends import mkldnn

from autotune import Task
from autotune.devices import open_device
from autotune.devices.cpu import CpuDevice
from autotune.probe.measure import Run
from autotune.probe.timing import MIN_BLOCK_S
from autotune.records.config import ProbeSettings, ShapeGrowth
from autotune.session import prepare
from tests.devices.processes import in_process

LARGE_BYTES = 40 * 2**20
FEW = {"batch_size": 8, "sample_s": 0.05, "num_steps": 2}
kept = {}  # in a process of its own for each run


class Lines(torch.utils.data.Dataset):
    """200 samples of so many different lengths."""

    def __init__(self, num_lengths):
        self.num_lengths = num_lengths

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.ones(index % self.num_lengths + 20, 6)


class OwnMemory(CpuDevice):
    """One with memory of its own, where an allocator holds more than is in use."""

    capabilities = replace(CpuDevice.capabilities, own_memory=True)


def keep_nothing(batch):
    pass


def keep_a_block_for_each_shape(batch):
    kept.setdefault(batch.shape, bytearray(LARGE_BYTES))


def keep_a_block_for_each_shape_and_sample(batch):
    kept.setdefault(batch.shape, bytearray(len(batch) * LARGE_BYTES // 8))


def make_kernels_for_each_shape(batch):
    """13: each convolution needs the input in another order, too."""
    for num_channels in range(8, 14):
        torch.nn.functional.conv2d(torch.ones(4, 16, batch.shape[1], 64), torch.ones(num_channels, 16, 5, 5))


def keep_a_block_for_each_shape_beside_a_kernel(batch):
    torch.nn.functional.conv2d(torch.ones(4, 16, batch.shape[1], 64), torch.ones(8, 16, 5, 5))
    keep_a_block_for_each_shape(batch)


def refuse_few(batch):
    if len(batch) < FEW["batch_size"]:
        raise ValueError("too few")


def leak_a_large_tensor(batch):
    kept[len(kept)] = torch.empty(LARGE_BYTES, dtype=torch.uint8)


def leak_a_small_tensor_and_keep_a_block_for_each_shape(batch):
    kept[len(kept)] = batch.sum()
    keep_a_block_for_each_shape(batch)


def run(keep, num_lengths=200, batch_size=1, sample_s=MIN_BLOCK_S, num_steps=20, has_own_memory=False, **known):
    """What a probe tells where `keep` takes note of each batch, and how many samples each batch had."""
    sizes, taken_s = [], [0.0]

    def training_step(model, batch):
        taken_s[0] += sample_s * len(batch)  # by the clock alone; each block is one step
        keep(batch)
        sizes.append(len(batch))
        return model(batch).mean()

    task = Task(
        build_model=lambda: nn.Linear(6, 3),
        train_dataset=lambda: Lines(num_lengths),
        training_step=training_step,
        collate_fn=lambda lines: nn.utils.rnn.pad_sequence(lines, batch_first=True),
    )
    device = OwnMemory() if has_own_memory else open_device("cpu")
    settings = ProbeSettings(memory_limit_bytes=None, max_timed_s=0.2, num_steps=num_steps, interval=0.0001, **known)
    session = prepare(task, {"batch_size": batch_size}, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda now=time.perf_counter: now() + taken_s[0])
        found = Run(session, device, settings, lambda progress: None).measure(0.0)
    assert found.num_shapes > (5 if num_steps > 5 else 0)
    return found, sizes


def long_run(keep, **how):
    """The same in a process that holds nothing of other tests, as a probe does: neither a peak nor holes in which blocks would lie."""
    return in_process(partial(run, keep, **how))


def test_what_is_cached_for_each_shape_is_expected_to_go_on_growing():
    found, _ = long_run(keep_a_block_for_each_shape)
    assert found.long_run_growth_bytes > 100 * 2**20
    assert found.long_run_peak_bytes == found.peak_bytes + found.long_run_growth_bytes
    assert long_run(keep_nothing)[0].long_run_growth_bytes == 0


def test_growth_by_shape_is_told_only_where_memory_is_the_hosts():
    found, _ = long_run(keep_a_block_for_each_shape, has_own_memory=True)
    assert found.growth_bytes_per_step > 10 * 2**20 and found.shape_growth is None and found.long_run_growth_bytes == 0


@pytest.mark.skipif(not mkldnn.is_available(), reason="this torch has no oneDNN")
def test_growth_by_kernels_is_expected_to_end_where_their_cache_is_full():
    found, _ = long_run(make_kernels_for_each_shape)
    assert 0 < found.long_run_growth_bytes < 0.8 * (200 - found.num_shapes) * found.shape_growth.bytes_per_shape


def test_growth_by_what_is_no_kernel_is_expected_to_go_on_where_kernels_are_made_too():
    found, _ = long_run(keep_a_block_for_each_shape_beside_a_kernel)
    alone, _ = long_run(keep_a_block_for_each_shape)
    assert found.long_run_growth_bytes == pytest.approx(alone.long_run_growth_bytes, rel=0.1)


def test_growth_is_expected_to_end_with_the_last_shape_that_the_training_set_has():
    found, _ = long_run(keep_a_block_for_each_shape, num_lengths=40)
    num_left = 40 - found.num_shapes
    assert found.long_run_growth_bytes == pytest.approx(num_left * LARGE_BYTES, rel=0.2, abs=1)


def test_where_it_is_known_how_many_shapes_come_that_is_not_looked_for():
    found, _ = long_run(keep_a_block_for_each_shape, num_shapes=50.0)
    assert found.num_shapes_expected == 50
    assert found.long_run_growth_bytes == pytest.approx((50 - found.num_shapes) * LARGE_BYTES, rel=0.2)


def test_where_whole_batches_have_one_shape_small_ones_show_that_shapes_differ():
    large = {**FEW, "batch_size": 199, "sample_s": 0.002}  # each has one of the two longest samples
    found, sizes = long_run(keep_a_block_for_each_shape, num_lengths=100, **large)
    assert found.num_shapes == 1
    assert found.shape_growth.bytes_per_shape == pytest.approx(LARGE_BYTES, rel=0.1) and min(sizes) < 199


def test_small_batches_that_fail_tell_nothing():
    assert long_run(refuse_few, **FEW)[0].shape_growth is None


@pytest.mark.parametrize("sample_s", [FEW["sample_s"], 0.15])  # some whole batches after the small ones, or hardly any
def test_where_batches_are_few_and_large_small_ones_show_what_a_new_shape_takes(sample_s):
    found, _ = long_run(keep_a_block_for_each_shape, **{**FEW, "sample_s": sample_s})
    assert found.shape_growth.bytes_per_shape == pytest.approx(LARGE_BYTES, rel=0.1)
    assert found.long_run_growth_bytes > 100 * 2**20


def test_where_nothing_is_kept_small_ones_show_no_growth():
    assert long_run(keep_nothing, **FEW)[0].shape_growth == ShapeGrowth(bytes_per_shape=0.0)


def test_where_it_is_known_what_is_kept_for_each_shape_few_batches_are_enough():
    known = ShapeGrowth(bytes_per_shape=float(LARGE_BYTES), most_bytes=5.0 * LARGE_BYTES)
    found, sizes = long_run(keep_nothing, shape_growth=known, num_shapes=100.0, **FEW)
    assert found.shape_growth == known and found.long_run_growth_bytes == 5 * LARGE_BYTES
    assert 2 in sizes and len([size for size, _ in groupby(sizes)]) == 2  # a leak alone is looked for


def test_small_batches_that_take_less_for_each_shape_are_followed_by_whole_ones():
    found, sizes = long_run(keep_a_block_for_each_shape_and_sample, **FEW)
    # kernels are counted in whole ones, and a leak is looked for with small ones
    assert [size for size, _ in groupby(sizes)] == [8, 2, 8, 2]
    assert found.shape_growth.bytes_per_shape == pytest.approx(LARGE_BYTES, rel=0.1)


def test_a_leak_is_no_cache_and_a_small_one_hides_none():
    found, _ = long_run(leak_a_large_tensor)
    assert found.leaks and found.growth_bytes_per_step > 10 * 2**20 and found.long_run_growth_bytes == 0
    for few in ({}, FEW):
        found, _ = long_run(leak_a_small_tensor_and_keep_a_block_for_each_shape, **few)
        assert found.leaks and found.long_run_growth_bytes > 100 * 2**20
