"""Segmentation of medical scans: a U-Net in the manner of nnU-Net, with a loss per pixel.

Stands for dense prediction: large early activations, skip connections that live from one end of the network to the other,
and transposed convolutions. InstanceNorm and LeakyReLU, cross entropy plus soft Dice, SGD with Nesterov momentum. The scans
are made: bright ellipses of two kinds in smooth noise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16  # channels at full resolution; each level below doubles them
LEVELS = 4
PIXELS = 64
CLASSES = 3  # background, organ, lesion

GLOBAL_BATCH = 16
BASELINE = {"batch_size": 8}  # plain fp32, two micro steps


def convolutions(in_channels: int, out_channels: int) -> nn.Sequential:
    """Two 3x3 convolutions, each with its norm and activation."""
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers += [
            nn.Conv2d(channels, out_channels, 3, padding=1, bias=False),
            nn.InstanceNorm2d(out_channels, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Scans (batch, 1, PIXELS, PIXELS) to logits (batch, CLASSES, PIXELS, PIXELS)."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH * 2**level for level in range(LEVELS)]
        self.down = nn.ModuleList(
            convolutions(before, width) for before, width in zip([1, *widths], widths, strict=False)
        )
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]  # (below, here), from the bottom up
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(below, here, 2, stride=2) for below, here in pairs)
        self.up = nn.ModuleList(convolutions(2 * here, here) for _, here in pairs)
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skipped.append(x)
        skipped.pop()
        for enlarge, block in zip(self.enlarge, self.up, strict=True):
            x = block(torch.cat([skipped.pop(), enlarge(x)], dim=1))
        return self.head(x)


def build_model() -> nn.Module:
    return UNet()


def ellipses(batch_size: int, radius_low: float, radius_high: float) -> torch.Tensor:
    """Masks (batch_size, PIXELS, PIXELS) of one ellipse each; coordinates run from -1 to 1."""
    centre = torch.rand(2, batch_size, 1, 1) - 0.5
    radius = radius_low + (radius_high - radius_low) * torch.rand(2, batch_size, 1, 1)
    axis = torch.linspace(-1, 1, PIXELS)
    return ((axis[:, None] - centre[0]) / radius[0]) ** 2 + ((axis - centre[1]) / radius[1]) ** 2 < 1


def make_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scans (batch_size, 1, PIXELS, PIXELS) and a class per pixel (batch_size, PIXELS, PIXELS)."""
    organ, lesion = ellipses(batch_size, 0.3, 0.6), ellipses(batch_size, 0.1, 0.25)
    classes = torch.where(lesion, 2, organ.long())
    tissue = F.interpolate(torch.randn(batch_size, 1, 12, 12), size=PIXELS, mode="bilinear")
    scans = classes[:, None] + 0.5 * tissue + 0.3 * torch.randn(batch_size, 1, PIXELS, PIXELS)
    return scans, classes


def training_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cross entropy plus one minus soft Dice (Milletari et al., 2016), both means over the scans of the batch."""
    scans, classes = batch
    logits = model(scans).float()
    truth = F.one_hot(classes, CLASSES).movedim(-1, 1).float()
    share = logits.softmax(dim=1)
    overlap, total = (share * truth).sum(dim=(2, 3)), (share + truth).sum(dim=(2, 3))
    dice = (2 * overlap + 1) / (total + 1)
    return F.cross_entropy(logits, classes) + 1 - dice[:, 1:].mean()


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5)
