"""A step that runs out of the GPU's memory is taken again, and trains as smaller micro batches would have."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.task import Task
from autotune.task.batches import StepBatch
from autotune.units import MIB
from tests.devices.processes import in_process

pytestmark = pytest.mark.gpu
ROOM_MIB = 240  # the long input takes 330 MiB beside the model, its half 165


def make_batch(batch_size, length=256):
    return torch.randn(batch_size, length, 64), torch.randn(batch_size, length, 64)


def block():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))


def leave_room(room_mib):
    """Let the process reserve so many MiB more than it has reserved, if the card has as many."""
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_reserved() + room_mib * MIB) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def trained(in_halves, room_mib):
    """Losses and parameters of a short, a long and a short step, and what was said meanwhile."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("autotune").addHandler(handler)
    torch.manual_seed(2)
    short, (x, y) = make_batch(16), make_batch(16, 4096)
    long = StepBatch([((x[:8], y[:8]), 8), ((x[8:], y[8:]), 8)]) if in_halves else (x, y)
    torch.manual_seed(0)
    task = Task(build_model=lambda: nn.Sequential(*(block() for _ in range(12))), make_batch=make_batch)
    session = prepare(task, {"batch_size": 16, "amp": "fp16"}, device="cuda:0")
    torch.manual_seed(1)
    session.step(short)
    leave_room(room_mib)
    losses = [session.step(batch).item() for batch in (short, long, short)]
    return losses, [parameter.detach().cpu().numpy() for parameter in session.model.parameters()], "\n".join(said)


@pytest.mark.values
def test_a_long_input_under_a_real_limit_is_trained_as_its_halves_would_have_been():
    expected_losses, expected, said = in_process(trained, True, 8192)
    assert not said
    losses, parameters, said = in_process(trained, False, ROOM_MIB)
    assert "out of memory in a micro batch of 16 samples" in said
    assert "out of memory in a micro batch of 8 samples" not in said
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-3)
    for ours, theirs in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def draw_again_without_waiting():
    from autotune.randomness import RandomState

    torch.cuda.init()
    torch.cuda.set_sync_debug_mode("error")
    state = RandomState(torch.device("cuda", 0))
    torch.cuda.set_sync_debug_mode("default")
    torch.rand(4, device="cuda:0")
    moved = state.has_moved()
    state.restore()
    return moved, state.has_moved()


def test_the_gpus_random_state_is_read_without_waiting_for_it_and_restored():
    assert in_process(draw_again_without_waiting) == (True, False)
