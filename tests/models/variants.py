"""Two architectures of a chain of blocks."""

import torch
from torch import nn

VARIANTS = ["base", "small"]
FREEZE = ["0"]
GLOBAL_BATCH = 48
BASELINE = {"batch_size": 4}


def build_model(variant):
    width = {"base": 128, "small": 32}[variant]
    blocks = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3))
    return nn.Sequential(nn.Linear(64, width), nn.Sequential(*blocks), nn.Linear(width, 10))


def make_batch(batch_size):
    return torch.randn(batch_size, 64), torch.randint(10, (batch_size,))
