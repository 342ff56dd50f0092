"""Small tasks of six kinds of model, on which every technique is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from autotune.task import Task


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Attention(16) for _ in range(3))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)
        )
        self.activation = nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.activation(x + self.layers(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x[:, -1])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.level(3, 8, 2), self.level(8, 16, 2)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(16, 3, 2, 2)])

    @staticmethod
    def level(inside: int, outside: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(2, outside), nn.SiLU())

    def forward(self, x: Any) -> Any:
        outer = self.down[0](x)
        inner = self.up[0](self.down[1](outer))
        return self.up[1](torch.cat([outer, inner], 1))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def sparse() -> nn.Module:
    bag = nn.EmbeddingBag(32, 8, mode="sum", sparse=True)
    return nn.Sequential(bag, nn.Sequential(*(block() for _ in range(3))), nn.Linear(8, 4))


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Sequential(*(block() for _ in range(3))), nn.Linear(8, 4))
    model[0][0].requires_grad_(False)
    return model


def residual() -> nn.Module:
    blocks = nn.Sequential(*(Residual(4) for _ in range(3)))
    return nn.Sequential(nn.Conv2d(3, 4, 3), blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


def images(n: int) -> Any:
    return torch.randn(n, 3, 8, 8), torch.randint(0, 4, (n,))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _words(n: int) -> Any:
    return torch.randint(0, 32, (n, 12)), torch.randint(0, 4, (n,))


KINDS: dict[str, Callable[[], Task]] = {
    "transformer": lambda: Task(
        build_model=Transformer, make_batch=lambda n: (torch.randint(0, 32, (n, 12)), torch.randint(0, 32, (n, 12)))
    ),
    "residual": lambda: Task(build_model=residual, make_batch=images, configure_optimizers=sgd),
    "recurrent": lambda: Task(build_model=Recurrent, make_batch=_words),
    "unet": lambda: Task(build_model=UNet, make_batch=lambda n: (torch.randn(n, 3, 16, 16), torch.randn(n, 3, 16, 16))),
    "sparse": lambda: Task(
        build_model=sparse,
        make_batch=_words,
        configure_optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ),
    "frozen": lambda: Task(
        build_model=partly_frozen, make_batch=lambda n: (torch.randn(n, 8), torch.randint(0, 4, (n,)))
    ),
}
