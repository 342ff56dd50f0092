import torch
from torch import nn

from autotune.coupling.buffers import Counters


class Positions(nn.Module):
    """Keeps positions for the length of the latest batch, and counts batches."""

    def __init__(self):
        super().__init__()
        self.length, self.kept, self.count = 0, torch.zeros(0), nn.Identity()
        self.count.batches = 0

    def forward(self, x):
        self.count.batches += 1
        if len(x) != self.length:
            self.length, self.kept = len(x), torch.arange(len(x)).sin()
        return x + self.kept


def test_counters_are_put_back_but_a_length_stays_with_the_positions_that_are_kept_for_it():
    model = Positions()
    model(torch.ones(3))
    counters = Counters(model)
    model(torch.ones(6))
    assert counters.changed() == "count.batches"
    counters.restore()
    assert model.count.batches == 1 and not counters.changed()
    assert model(torch.ones(3)).shape == (3,)


class Noted(nn.Module):
    """Keeps what it found for each sample where it began with a number."""

    def __init__(self):
        super().__init__()
        self.divergence = 0

    def forward(self, x):
        self.divergence = x.square()
        return x


def test_a_number_that_becomes_a_tensor_is_no_counter():
    model = Noted()
    counters = Counters(model)
    model(torch.ones(3))
    assert not counters.changed()
    counters.restore()
    assert len(model.divergence) == 3
