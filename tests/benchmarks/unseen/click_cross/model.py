"""Which advertisement is clicked: a deep and cross network over large embedding tables, as recommenders use.

Stands for tabular models: nearly all parameters are rows of embedding tables, so that the optimizer's pass over them and
random reads of memory weigh more than arithmetic, and a step hardly depends on the micro batch. Cross layers as in DCN-v2
(Wang et al., 2021) beside an MLP, binary cross entropy over rare clicks, dense Adagrad. The impressions are made: skewed
categories as in logs, and counts of long tails.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

TABLES = (40_000, 40_000, 20_000, 20_000, 10_000, 10_000, 5_000, 2_000, 1_000, 500, 100, 50, 24, 7)  # rows of each
WIDTH = 24  # of an embedding
COUNTS = 13
CROSS_LAYERS = 3
HIDDEN = (512, 256)

GLOBAL_BATCH = 2048
BASELINE = {"batch_size": 1024}  # plain fp32, two micro steps

OFFSETS = torch.tensor((0, *TABLES[:-1])).cumsum(0)  # the tables lie in one

Batch = dict[str, torch.Tensor]


class CrossNetwork(nn.Module):
    """Rows (batch, tables) and counts (batch, COUNTS) to the logit of a click (batch,)."""

    def __init__(self) -> None:
        super().__init__()
        inputs = len(TABLES) * WIDTH + COUNTS
        self.register_buffer("offsets", OFFSETS.clone(), persistent=False)
        self.embedding = nn.Embedding(sum(TABLES), WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.count_norm = nn.LayerNorm(COUNTS)
        self.cross = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(CROSS_LAYERS))
        self.deep = nn.Sequential(
            nn.Linear(inputs, HIDDEN[0]),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(HIDDEN[0], HIDDEN[1]),
            nn.ReLU(),
        )
        self.head = nn.Linear(inputs + HIDDEN[1], 1)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(rows + self.offsets).flatten(1)
        first = torch.cat([embedded, self.count_norm(counts.log1p())], dim=1)
        crossed = first
        for layer in self.cross:
            crossed = first * layer(crossed) + crossed
        return self.head(torch.cat([crossed, self.deep(first)], dim=1)).squeeze(1)


def build_model() -> nn.Module:
    return CrossNetwork()


def make_batch(batch_size: int) -> Batch:
    """Impressions: `rows` (batch_size, tables), `counts` (batch_size, COUNTS) and `clicked` (batch_size,)."""
    sizes = torch.tensor(TABLES)
    rows = (torch.rand(batch_size, len(TABLES)) ** 4 * sizes).long()  # low rows are frequent ones
    counts = torch.randn(batch_size, COUNTS).exp().mul(5).floor()
    score = (rows % 7 == 0).sum(dim=1) - 0.02 * counts[:, 0] - 7.0
    return {"rows": rows, "counts": counts, "clicked": (torch.rand(batch_size) < score.sigmoid()).float()}


def training_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch["rows"], batch["counts"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicked"])


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.02)
