"""A convolutional residual network with BatchNorm on scikit-learn's 1,797 scanned digits (`load_digits`).

The 8x8 scans are enlarged. The default size suits a two-core CPU. Larger machines set the environment:

    DIGITS_WIDTH         channels of the first stage; each further stage doubles them    16
    DIGITS_DEPTH         residual blocks a stage                                         2
    DIGITS_PIXELS        height and width of an image, a multiple of 8                   32
    DIGITS_GLOBAL_BATCH  samples an optimizer step, at most 1797                         192

For example `DIGITS_WIDTH=64 DIGITS_DEPTH=4 DIGITS_PIXELS=128 DIGITS_GLOBAL_BATCH=768`.

BatchNorm makes the micro batch a part of what is learned, so the baseline takes the whole batch at once, and smaller micro
batches are searched only with `--include accumulation_steps`.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

WIDTH = int(os.environ.get("DIGITS_WIDTH", "16"))
DEPTH = int(os.environ.get("DIGITS_DEPTH", "2"))
PIXELS = int(os.environ.get("DIGITS_PIXELS", "32"))
STAGES = 3
CLASSES = 10

GLOBAL_BATCH = int(os.environ.get("DIGITS_GLOBAL_BATCH", "192"))
BASELINE = {"batch_size": GLOBAL_BATCH}  # plain fp32, no accumulation

SCANS = load_digits()
# Converted by NumPy: torch would start its threads for it, and a process that has threads cannot be forked from.
IMAGES = torch.from_numpy((SCANS.images[:, None] / 16).astype("float32"))  # (1797, 1, 8, 8), from 0 to 1
LABELS = torch.from_numpy(SCANS.target.astype("int64"))


def convolution(in_channels: int, out_channels: int, kernel_size: int = 3, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps height and width (divided by `stride`), and its BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(in_channels, out_channels, stride=stride)
        self.second = convolution(out_channels, out_channels)
        same = in_channels == out_channels and stride == 1
        self.shortcut = nn.Identity() if same else convolution(in_channels, out_channels, kernel_size=1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def stage(index: int) -> nn.Sequential:
    """Residual blocks of one width; every stage but the first halves the image with its first block."""
    width, stride = WIDTH * 2**index, 1 if index == 0 else 2
    first = ResidualBlock(width // stride, width, stride)
    return nn.Sequential(first, *(ResidualBlock(width, width, 1) for _ in range(DEPTH - 1)))


def build_model() -> nn.Module:
    """Images (batch, 1, PIXELS, PIXELS) to logits (batch, 10)."""
    return nn.Sequential(
        nn.Sequential(convolution(1, WIDTH), nn.ReLU()),
        *(stage(index) for index in range(STAGES)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTH * 2 ** (STAGES - 1), CLASSES),
    )


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random digits, enlarged: images (batch_size, 1, PIXELS, PIXELS) and labels (batch_size,). Cross entropy is the default."""
    chosen = torch.randint(len(IMAGES), (batch_size,))
    images = F.interpolate(IMAGES[chosen], size=(PIXELS, PIXELS), mode="bilinear", align_corners=False)
    return images, LABELS[chosen]


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
