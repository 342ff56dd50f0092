"""A step that runs out of the GPU's memory is taken again, and trains as smaller micro batches would have."""

import gc

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.task import Task
from autotune.task.batches import StepBatch
from autotune.units import MIB

pytestmark = pytest.mark.gpu


def make_batch(batch_size, length=256):
    return torch.randn(batch_size, length, 64), torch.randn(batch_size, length, 64)


@pytest.fixture
def limited():
    """Leaves the process room for so many MiB more than it has reserved."""

    def limit(room_mib):
        gc.collect()
        torch.cuda.empty_cache()
        most = torch.cuda.memory_reserved() + room_mib * MIB
        torch.cuda.set_per_process_memory_fraction(most / torch.cuda.get_device_properties(0).total_memory)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_long_input_under_a_real_limit_is_trained_as_its_halves_would_have_been(limited, caplog):
    def block():
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))

    def trained(long, room_mib):
        torch.manual_seed(0)
        task = Task(build_model=lambda: nn.Sequential(*(block() for _ in range(12))), make_batch=make_batch)
        session = prepare(task, {"batch_size": 16, "amp": "fp16"}, device="cuda:0")
        torch.manual_seed(1)
        session.step(short)
        limited(room_mib)
        losses = [session.step(batch) for batch in (short, long, short)]
        return [loss.cpu() for loss in losses], [parameter.detach().cpu() for parameter in session.model.parameters()]

    torch.manual_seed(2)
    short, (x, y) = make_batch(16), make_batch(16, 4096)
    expected_losses, expected = trained(StepBatch([((x[:8], y[:8]), 8), ((x[8:], y[8:]), 8)]), 8192)
    assert not caplog.records
    losses, parameters = trained((x, y), 320)
    assert "out of memory in a micro batch of 16 samples" in caplog.text
    assert "out of memory in a micro batch of 8 samples" not in caplog.text
    for ours, theirs in zip([*losses, *parameters], [*expected_losses, *expected], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_reading_the_random_state_does_not_wait_for_the_gpu():
    from autotune.randomness import RandomState

    torch.cuda.init()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        state = RandomState(torch.device("cuda", 0))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    drawn = torch.rand(4, device="cuda:0")
    state.restore()
    assert torch.equal(torch.rand(4, device="cuda:0"), drawn)
