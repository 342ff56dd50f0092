"""Sparse gradients of an EmbeddingBag and an Embedding, and a dense head."""

import torch
from torch import nn


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(5000, 32, mode="sum", sparse=True)
        self.embedding = nn.Embedding(1000, 32, sparse=True)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self, words, topic):
        return self.head(torch.cat([self.bag(words), self.embedding(topic)], -1))


def build_model():
    return Bags()


def make_batch(batch_size):
    return torch.randint(5000, (batch_size, 50)), torch.randint(1000, (batch_size,)), torch.randint(4, (batch_size,))


def training_step(model, batch):
    words, topic, label = batch
    return nn.functional.cross_entropy(model(words, topic), label)


def configure_optimizers(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


GLOBAL_BATCH = 64
