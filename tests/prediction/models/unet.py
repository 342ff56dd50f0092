"""An encoder and a decoder with skips between them: activations that live long."""

import torch
import torch.nn.functional as F
from torch import nn


def block(narrow, wide):
    return nn.Sequential(nn.Conv2d(narrow, wide, 3, padding=1), nn.GroupNorm(4, wide), nn.SiLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (16, 32, 64)
        self.down = nn.ModuleList(block(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        self.middle = block(64, 64)
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((64, 64), (64, 32), (32, 16)))
        self.join = nn.ModuleList(block(2 * width, width) for width in reversed(widths))
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips), strict=True):
            x = join(torch.cat([up(x), skip], 1))
        return self.head(x)


def build_model():
    return UNet()


def make_batch(batch_size):
    return torch.randn(batch_size, 3, 32, 32), torch.randn(batch_size, 1, 32, 32)


GLOBAL_BATCH = 32
