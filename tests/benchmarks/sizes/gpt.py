"""GPT-2 in plain torch, its output tied to its input, at a context of 1024: SIZE is 124M, 355M or 1.3B."""

import math
import os

import torch
from torch import nn
from torch.nn import functional

SIZES = {"124M": (12, 12, 768), "355M": (24, 16, 1024), "1.3B": (24, 32, 2048)}
LAYERS, HEADS, WIDTH = SIZES[os.environ.get("SIZE", "124M")]
VOCABULARY, CONTEXT = 50257, 1024


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.inputs(x).split(WIDTH, dim=2))
        found = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.output(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention())
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.words.weight = self.head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                std = 0.02 / math.sqrt(2 * LAYERS) if name.endswith("output.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(CONTEXT, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model():
    return GPT()


def make_batch(batch_size):
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT))
    return tokens, tokens


def training_step(model, batch):
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
