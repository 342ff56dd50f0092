"""Tied and frozen parameters, gradients clipped and checked, and a loss that is logged."""

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(400, 64)
        self.frozen = nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(64, 400, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(64))

    def forward(self, tokens):
        x = self.frozen(self.embedding(tokens)) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build_model():
    return Tied()


def make_batch(batch_size):
    tokens = torch.randint(400, (batch_size, 33))
    return tokens[:, :-1], tokens[:, 1:]


SEEN = []


def training_step(model, batch):
    tokens, next_tokens = batch
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), next_tokens.flatten())
    if not torch.isfinite(loss).item():
        SEEN.append("bad")
    SEEN.append(loss.item())
    return loss


def configure_optimizers(model):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def clip(*_):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    optimizer.register_step_pre_hook(clip)
    return optimizer


GLOBAL_BATCH = 32
