"""Sparse gradients from an EmbeddingBag, and an optimizer that takes nothing else."""

import torch
from torch import nn


def build_model():
    return nn.EmbeddingBag(500, 16, mode="sum", sparse=True)


def make_batch(batch_size):
    return torch.randint(500, (batch_size, 20)), torch.randint(16, (batch_size,))


def configure_optimizers(model):
    return torch.optim.SparseAdam(model.parameters(), lr=0.01)


GLOBAL_BATCH = 48
BASELINE = {"batch_size": 4}
