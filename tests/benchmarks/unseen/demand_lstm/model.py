"""A forecast of electricity demand: an encoder-decoder LSTM over four days of hours, and the default mean squared error.

Stands for recurrent networks: long chains of small operations, of which one step is too little work for a processor or
card. The encoder reads 96 hours at once; the decoder is an LSTM cell that is fed its own forecast, 24 hours in a Python
loop. There is no `training_step`: the pair of float tensors has a default loss. Gradients are clipped. The demand is made:
daily and weekly cycles of many meters, weather and noise.
"""

from __future__ import annotations

import math

import torch
from torch import nn

HOURS, HORIZON = 96, 24
FEATURES = 6  # demand, temperature, and sine and cosine of the hour and of the weekday
HIDDEN = 64

GLOBAL_BATCH = 128
BASELINE = {"batch_size": 64}  # plain fp32, two micro steps
MAX_GRAD_NORM = 1.0


class Forecaster(nn.Module):
    """The hours before (batch, HOURS, FEATURES) to the demand of the hours after (batch, HORIZON)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(FEATURES, HIDDEN, num_layers=2, dropout=0.1, batch_first=True)
        self.cell = nn.LSTMCell(1, HIDDEN)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        _, (hidden, cell) = self.encoder(before)
        state = hidden[-1], cell[-1]
        demand = before[:, -1, :1]
        forecast = []
        for _ in range(HORIZON):
            state = self.cell(demand, state)
            demand = demand + self.head(state[0])
            forecast.append(demand)
        return torch.cat(forecast, dim=1)


def build_model() -> nn.Module:
    return Forecaster()


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random days of random meters: `before` (batch_size, HOURS, FEATURES) and `after` (batch_size, HORIZON)."""
    hour = torch.randint(168, (batch_size, 1)) + torch.arange(HOURS + HORIZON)
    day, week = 2 * math.pi * hour / 24, 2 * math.pi * hour / 168
    clock = torch.stack([day.sin(), day.cos(), week.sin(), week.cos()], dim=-1)
    temperature = torch.randn(batch_size, 1) - 0.5 * (day + 0.5).cos()
    habits = torch.randn(batch_size, 1, 4)
    demand = (clock * habits).sum(dim=-1) + 0.3 * temperature**2 + 0.1 * torch.randn(batch_size, HOURS + HORIZON)
    features = torch.cat([demand[..., None], temperature[..., None], clock], dim=-1)
    return features[:, :HOURS], demand[:, HOURS:]


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)
