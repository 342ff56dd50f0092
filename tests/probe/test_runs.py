"""Who holds what while several processes are compared with one: whole copies are the first one's."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from autotune.devices import linux
from autotune.probe.checks import run_checks
from autotune.records.check import Check
from autotune.records.config import World
from autotune.task import Task
from tests.worlds import Ranks

WIDTH, NUM_LAYERS = 1280, 4
MODEL_BYTES = 4 * NUM_LAYERS * WIDTH**2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as running:
        yield running


def build_model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])


def compare(world: World, parallel: str) -> tuple[Check, int]:
    """What a comparison found, and how many bytes it takes at its peak, beyond what the process had before."""
    task = Task(
        build_model=build_model,
        make_batch=lambda n: torch.randn(n, WIDTH),
        training_step=lambda model, batch: model(batch).square().mean(),
        configure_optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    )
    held: list[int] = []
    # Free pieces of the heap hold copies unseen, now and then in three of five comparisons, so the largest counts.
    for _ in range(5):
        # Free pieces of the heap, also those of the process that this one was forked from, would hold copies unseen.
        ctypes.CDLL(None).malloc_trim(0)
        before_bytes = linux.process_memory().touched_bytes
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        check = run_checks(task, {"parallel": parallel}, "cpu", batch_size=4, world=world)
        held.append(linux.process_memory().peak_touched_bytes - before_bytes)
    return check, max(held)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_first_process_alone_holds_whole_copies(ranks: Ranks, parallel: str) -> None:
    (first, first_bytes), (second, second_bytes) = ranks.run(compare, parallel)
    assert first.passed, first.reason
    assert second == first
    # of what plain training began with, of its gradients, and of how its parameters moved
    assert first_bytes - second_bytes > 2.5 * MODEL_BYTES


class Graph(nn.Module):
    """A graph convolution, whose adjacency each process draws for itself."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        drawn = torch.randn(1, 16).expand(16, 16)
        self.register_buffer("adjacency", drawn.to_sparse() if is_sparse else drawn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.adjacency @ self.up(x).T).T


def compare_graphs(world: World, is_sparse: bool) -> Check:
    task = Task(
        build_model=lambda: Graph(is_sparse=is_sparse),
        make_batch=lambda n: torch.randn(n, 16),
        training_step=lambda model, batch: model(batch).square().mean(),
    )
    torch.manual_seed(world.rank)
    return run_checks(task, {"parallel": "fsdp"}, "cpu", batch_size=4, world=world)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_shards_of_a_model_with_a_sparse_or_expanded_buffer_are_compared(ranks: Ranks, is_sparse: bool) -> None:
    first, second = ranks.run(compare_graphs, is_sparse)
    assert first.passed, first.reason
    assert second == first
