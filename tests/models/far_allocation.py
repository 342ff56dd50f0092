"""Batches of 32 and more ask for a pebibyte, and the failure is wrapped in an exception of the user's own."""

import time

import torch
from torch import nn


class Far(nn.Linear):
    def forward(self, x):
        if len(x) >= 32:
            try:
                torch.empty(2**50, dtype=torch.uint8)
            except RuntimeError as error:
                raise ValueError("the layer failed") from error
        time.sleep(0.03)  # the largest batch is clearly the fastest then, and no play-off takes long
        return super().forward(x)


def build_model():
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), Far(128, 10))


def make_batch(batch_size):
    return torch.randn(batch_size, 128), torch.randint(10, (batch_size,))


BASELINE = {"batch_size": 4}
