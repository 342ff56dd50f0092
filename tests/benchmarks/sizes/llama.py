"""Llama in plain torch, at a context of 4096: SIZE is 7B or 70B."""

import os

import torch
from torch import nn
from torch.nn import functional

SIZES = {"7B": (4096, 11008, 32, 32, 32), "70B": (8192, 28672, 80, 64, 8)}
WIDTH, INNER, LAYERS, HEADS, KEY_HEADS = SIZES[os.environ.get("SIZE", "7B")]
HEAD = WIDTH // HEADS
VOCABULARY, CONTEXT = 32000, 4096


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))

    def forward(self, x, cos, sin):
        query, key, value = (
            layer(x).unflatten(2, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        if KEY_HEADS != HEADS:
            key, value = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(found.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.before_feed_forward, self.feed_forward = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.before_attention(x), cos, sin)
        return x + self.feed_forward(self.before_feed_forward(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(CONTEXT).float(), 10000 ** -(torch.arange(0, HEAD, 2) / HEAD))
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def build_model():
    return Llama()


def make_batch(batch_size):
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT))
    return tokens, tokens


def training_step(model, batch):
    tokens, targets = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
