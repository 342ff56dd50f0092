"""A model whose micro steps all take the same time: the largest is clearly the fastest, and a play-off is soon decided."""

import time

import torch
from torch import nn


def build_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)), nn.Linear(128, 10))


def make_batch(batch_size):
    return torch.randn(batch_size, 128), torch.randint(10, (batch_size,))


def training_step(model, batch):
    time.sleep(0.02)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


GLOBAL_BATCH = 48
BASELINE = {"batch_size": 4}
