"""A causal byte-level transformer on the English text that ships inside CPython (`pydoc_data.topics`).

The default size suits a two-core CPU. Larger machines set the environment:

    GPT_LAYERS        transformer blocks                      4
    GPT_WIDTH         model width, a multiple of GPT_HEADS    128
    GPT_HEADS         attention heads                         4
    GPT_CONTEXT       bytes a sample                          256
    GPT_VOCABULARY    tokens that are told apart, 256 of which occur   256
    GPT_GLOBAL_BATCH  samples an optimizer step               48

For example `GPT_LAYERS=24 GPT_WIDTH=1024 GPT_HEADS=16 GPT_CONTEXT=1024 GPT_GLOBAL_BATCH=384`: 300 million parameters. GPT-2's own
size, 124 million, with random weights and logits over its whole vocabulary, fills a large card:
`GPT_LAYERS=12 GPT_WIDTH=768 GPT_HEADS=12 GPT_CONTEXT=1024 GPT_VOCABULARY=50257 GPT_GLOBAL_BATCH=512`.
"""

from __future__ import annotations

import os
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

LAYERS = int(os.environ.get("GPT_LAYERS", "4"))
WIDTH = int(os.environ.get("GPT_WIDTH", "128"))
HEADS = int(os.environ.get("GPT_HEADS", "4"))
CONTEXT = int(os.environ.get("GPT_CONTEXT", "256"))
VOCABULARY = int(os.environ.get("GPT_VOCABULARY", "256"))  # every byte is a token

GLOBAL_BATCH = int(os.environ.get("GPT_GLOBAL_BATCH", "48"))
BASELINE = {"batch_size": GLOBAL_BATCH // 4}  # plain fp32, four micro steps

TEXT = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(
            -1, (3, HEADS, WIDTH // HEADS)
        )  # batch, time, 3, head, channel
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """Bytes (batch, time) to logits of the next byte (batch, time, VOCABULARY)."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(initialise)
        self.head.weight = self.token_embedding.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def initialise(module: nn.Module) -> None:
    """GPT-2's initial weights."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model() -> nn.Module:
    return GPT()


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text and the bytes that follow: two (batch_size, CONTEXT) tensors."""
    starts = torch.randint(len(TEXT) - CONTEXT, (batch_size, 1))
    windows = TEXT[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def training_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, next_tokens = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), next_tokens.flatten())


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on matrices only, as is usual."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
