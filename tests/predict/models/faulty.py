"""Builds and trains in plain fp32. Under autocast it aborts, with its channels last it needs values, checkpointed it hangs."""

import os
import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("image", torch.zeros(2, 3, 4, 4))

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            os.abort()
        if self.image.is_contiguous(memory_format=torch.channels_last):
            x = x[x.sum(1) > -1e9]
        if type(vars(self).get("forward")).__name__ == "_Checkpointed":
            time.sleep(600)
        return torch.relu(self.linear(x))


def build_model():
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(16, 1))


def make_batch(batch_size):
    return torch.randn(batch_size, 16), torch.randn(batch_size, 1)
