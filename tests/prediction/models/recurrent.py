"""Two LSTM layers and a GRU over embedded words."""

import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(128, 64, batch_first=True)
        self.head = nn.Linear(64, 300)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embedding(tokens))
        hidden, _ = self.gru(hidden)
        return self.head(hidden)


def build_model():
    return Recurrent()


def make_batch(batch_size):
    tokens = torch.randint(300, (batch_size, 17))
    return tokens[:, :-1], tokens[:, 1:]


def training_step(model, batch):
    tokens, next_tokens = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), next_tokens.flatten())


GLOBAL_BATCH = 32
