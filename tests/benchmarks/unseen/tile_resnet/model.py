"""Land cover of satellite tiles: a bottleneck ResNet with BatchNorm, several labels a tile, and slow data loading.

Stands for image training that reads and augments: every tile is cut out of a compressed scene, cropped, resized, turned and
jittered by NumPy in `__getitem__`, so that loading costs a good part of a step. The network starts like ResNet-50 (7x7
convolution, max pooling, 1x1-3x3-1x1 blocks); the loss is binary cross entropy over the labels. The scenes are made.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 24  # of the first stage's 3x3 convolutions; its output has four times as many channels
BLOCKS = (2, 2, 2)
PIXELS = 64
COVERS = 10  # kinds of land cover
SCENES, SCENE_PIXELS = 32, 192
TILE_PIXELS, TILE_STRIDE = 96, 16
TILES_PER_ROW = (SCENE_PIXELS - TILE_PIXELS) // TILE_STRIDE + 1
COVER_SHARE = 0.12  # of its area that a kind must cover to be a label of a tile

GLOBAL_BATCH = 48
BASELINE = {"batch_size": 48}  # plain fp32, the whole batch at once, as BatchNorm asks for; no workers

Sample = tuple[torch.Tensor, torch.Tensor]


def scene(random: np.random.Generator) -> bytes:
    """A compressed uint8 image (SCENE_PIXELS, SCENE_PIXELS, 4): red, green, blue and the kind of cover."""
    covers = random.integers(COVERS, size=(6, 6)).repeat(32, axis=0).repeat(32, axis=1)
    colours = np.random.default_rng(0).integers(40, 216, size=(COVERS, 3))
    colours = colours[covers] + random.integers(-30, 30, size=(SCENE_PIXELS, SCENE_PIXELS, 3))
    return zlib.compress(np.concatenate([colours, covers[..., None]], axis=-1).astype(np.uint8).tobytes(), level=1)


ARCHIVE = [scene(np.random.default_rng(seed)) for seed in range(SCENES)]


class Tiles(torch.utils.data.Dataset[Sample]):
    """Overlapping tiles of all scenes: an augmented image (3, PIXELS, PIXELS) and its labels (COVERS,)."""

    def __len__(self) -> int:
        return SCENES * TILES_PER_ROW**2

    def __getitem__(self, index: int) -> Sample:
        number, place = divmod(index, TILES_PER_ROW**2)
        row, column = (TILE_STRIDE * step for step in divmod(place, TILES_PER_ROW))
        pixels = np.frombuffer(zlib.decompress(ARCHIVE[number]), dtype=np.uint8)
        tile = pixels.reshape(SCENE_PIXELS, SCENE_PIXELS, 4)[row : row + TILE_PIXELS, column : column + TILE_PIXELS]
        shares = np.bincount(tile[..., 3].ravel(), minlength=COVERS) / TILE_PIXELS**2
        image = augmented(tile[..., :3], np.random.default_rng(int(torch.randint(2**31, ()))))
        return torch.from_numpy(image), torch.from_numpy((shares > COVER_SHARE).astype(np.float32))


def augmented(tile: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A random crop, resized, turned, jittered in colour and normalised: float32 (3, PIXELS, PIXELS)."""
    side = int(random.integers(PIXELS, TILE_PIXELS + 1))
    top, left = random.integers(TILE_PIXELS - side + 1, size=2)
    image = resized(tile[top : top + side, left : left + side].astype(np.float32), PIXELS)
    image = np.rot90(image, int(random.integers(4)))
    grey = image.mean(axis=-1, keepdims=True)
    image = grey + (image - grey) * random.uniform(0.7, 1.3) + random.uniform(-20, 20)
    image = image * random.uniform(0.8, 1.2, size=3) / 128 - 1
    return np.ascontiguousarray(image.transpose(2, 0, 1), dtype=np.float32)


def resized(image: np.ndarray, pixels: int) -> np.ndarray:
    """A square image (height, width, channels) enlarged or reduced to `pixels`, bilinear."""
    at = np.linspace(0, image.shape[0] - 1, pixels)
    low = np.minimum(at.astype(int), image.shape[0] - 2)
    share = (at - low).astype(np.float32)[:, None]
    rows = image[low] * (1 - share[..., None]) + image[low + 1] * share[..., None]
    return rows[:, low] * (1 - share) + rows[:, low + 1] * share


def train_dataset() -> torch.utils.data.Dataset[Sample]:
    return Tiles()


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(in_channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels or stride != 1:
            conv = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(out_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Images (batch, 3, PIXELS, PIXELS) to logits (batch, COVERS)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False), nn.BatchNorm2d(WIDTH)
        stages, channels = [], WIDTH
        for index, num_blocks in enumerate(BLOCKS):
            width = WIDTH * 2**index
            blocks = []
            for block in range(num_blocks):
                blocks.append(Bottleneck(channels, width, 2 if block == 0 and index > 0 else 1))
                channels = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, COVERS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x)), inplace=True), 3, 2, 1)
        return self.head(self.stages(x).mean(dim=(2, 3)))


def build_model() -> nn.Module:
    return ResNet()


def training_step(model: nn.Module, batch: Sample) -> torch.Tensor:
    images, labels = batch
    return F.binary_cross_entropy_with_logits(model(images), labels)


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
