"""A deep residual network: its activations are the peak."""

import torch
from torch import nn

GLOBAL_BATCH = 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        half = [nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)]
        self.body = nn.Sequential(*half, nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x):
        return x + self.body(x)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(32) for _ in range(24)))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def build_model():
    return Deep()


def make_batch(batch_size):
    return torch.randn(batch_size, 3, 96, 96), torch.randint(0, 10, (batch_size,))
