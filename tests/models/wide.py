"""1.6 billion parameters: 24 wide blocks. Built for real it takes 6.4 GB, and to be trained 25 GB."""

import os

import torch
from torch import nn

WIDTH = 8192


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        nn.init.trunc_normal_(self.layer.weight, std=0.02)
        with torch.no_grad():
            self.layer.bias.copy_(torch.arange(WIDTH) / WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.layer(self.norm(x)))


class Wide(nn.Sequential):
    def __init__(self):
        super().__init__(*(Block() for _ in range(24)))
        if os.environ.get("READS_VALUES") and self[0].layer.weight.mean() > 1:
            raise ValueError("the weights are too large")


def build_model():
    return Wide().to("cuda" if torch.cuda.is_available() else "cpu")


def make_batch(batch_size):
    return torch.randn(batch_size, WIDTH), torch.randn(batch_size, WIDTH)
