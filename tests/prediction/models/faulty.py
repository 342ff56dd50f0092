"""Builds and trains in plain fp32. Under autocast it aborts, checkpointed it hangs."""

import os
import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            os.abort()
        if type(vars(self).get("forward")).__name__ == "Checkpointed":
            time.sleep(600)
        return torch.relu(self.linear(x))


def build_model():
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(16, 1))


def make_batch(batch_size):
    return torch.randn(batch_size, 16), torch.randn(batch_size, 1)
