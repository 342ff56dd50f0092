"""A post-norm encoder with dropout, on padded sequences."""

import torch
from torch import nn

WIDTH, WORDS, VOCABULARY = 96, 64, 500


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens):
        encoded = self.layers(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.head(encoded.mean(1))


def build_model():
    return Encoder()


def make_batch(batch_size):
    tokens = torch.randint(1, VOCABULARY, (batch_size, WORDS))
    tokens[:, -3:] = 0
    return tokens, torch.randint(5, (batch_size,))


GLOBAL_BATCH = 32
