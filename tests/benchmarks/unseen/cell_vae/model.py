"""Gene expression of single cells: a variational autoencoder of counts, with a loss of its own, after scVI.

Stands for generative models with random numbers inside the forward pass and a likelihood of many elementwise functions
(`lgamma`, `softplus`, `log`): wide dense layers at both ends and little between them. The loss is the negative evidence lower
bound with a negative binomial likelihood (Lopez et al., 2018). The counts are made: cells of several types, sequenced to
different depths.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

GENES = 2_000
TYPES = 12  # of cells
HIDDEN, LATENT = 256, 20
EPSILON = 1e-6

GLOBAL_BATCH = 512
BASELINE = {"batch_size": 128}  # plain fp32, four micro steps


def layers(*widths: int) -> nn.Sequential:
    """Dense layers with LayerNorm, ReLU and dropout."""
    modules: list[nn.Module] = []
    for in_width, out_width in pairwise(widths):
        modules += [nn.Linear(in_width, out_width), nn.LayerNorm(out_width), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*modules)


class CountsVAE(nn.Module):
    """Counts (batch, GENES) to the expected counts (batch, GENES), and mean and log variance (batch, LATENT)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = layers(GENES, HIDDEN, HIDDEN)
        self.moments = nn.Linear(HIDDEN, 2 * LATENT)
        self.decoder = layers(LATENT, HIDDEN, HIDDEN)
        self.shares = nn.Linear(HIDDEN, GENES)
        self.log_dispersion = nn.Parameter(torch.zeros(GENES))

    def forward(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.moments(self.encoder(counts.log1p())).chunk(2, dim=-1)
        latent = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        shares = self.shares(self.decoder(latent)).float().softmax(dim=-1)
        return counts.sum(dim=-1, keepdim=True) * shares, mean, log_variance


def build_model() -> nn.Module:
    return CountsVAE()


def make_batch(batch_size: int) -> torch.Tensor:
    """Counts (batch_size, GENES) of random cells, float32."""
    gene = torch.arange(GENES)
    marked = gene % TYPES == torch.randint(TYPES, (batch_size, 1))  # genes that are active in this type of cell
    depth = torch.randn(batch_size, 1).mul(0.3).exp()
    return torch.poisson(depth * (0.3 + 2.0 * marked) * (1 + gene % 5))


def training_step(model: nn.Module, counts: torch.Tensor) -> torch.Tensor:
    """Negative evidence lower bound: a sum over genes and latent dimensions, a mean over the cells."""
    expected, mean, log_variance = model(counts)
    dispersion = F.softplus(model.log_dispersion) + EPSILON
    log_total = (dispersion + expected + EPSILON).log()
    log_likelihood = (
        torch.lgamma(counts + dispersion)
        - torch.lgamma(dispersion)
        - torch.lgamma(counts + 1)
        + dispersion * (dispersion.log() - log_total)
        + counts * ((expected + EPSILON).log() - log_total)
    )
    divergence = 0.5 * (mean.float() ** 2 + log_variance.float().exp() - 1 - log_variance.float())
    return divergence.sum(dim=-1).mean() - log_likelihood.sum(dim=-1).mean()


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-6)
