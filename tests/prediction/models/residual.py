"""A convolutional residual network with BatchNorm."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, narrow, wide, stride):
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(wide)
        self.shortcut = nn.Conv2d(narrow, wide, 1, stride) if stride > 1 or narrow != wide else nn.Identity()

    def forward(self, x):
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def build_model():
    stem = nn.Sequential(nn.Conv2d(3, 32, 7, 2, padding=3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    blocks = (Block(32, 32, 1), Block(32, 64, 2), Block(64, 64, 1), Block(64, 128, 2))
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def make_batch(batch_size):
    return torch.randn(batch_size, 3, 64, 64), torch.randint(10, (batch_size,))


def configure_optimizers(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


GLOBAL_BATCH = 32
