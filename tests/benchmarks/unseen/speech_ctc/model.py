"""Spelling out what was said: 1-D convolutions over raw sound, recordings of unequal length, and the CTC loss.

Stands for audio, and for data whose samples differ in size: a recording lasts 0.4 to 2.4 s, a batch is padded to its longest
one by `collate_fn`, and so memory and time depend on what is drawn. Strided convolutions as in wav2vec 2.0 and depthwise
separable ones as in QuartzNet; AdamW. The speech is made: each letter is a chord of its own.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

LETTERS = 28  # of the alphabet; 0 is CTC's blank
RATE = 8_000  # samples of sound a second
LETTER_SAMPLES = RATE // 10
NUM_LETTERS = (4, 24)  # of a recording, low and high
RECORDINGS = 1_024
WIDTH = 64
STRIDES = (5, 4, 4, 2)  # 160 samples of sound a frame
BLOCKS = 4

GLOBAL_BATCH = 32
BASELINE = {"batch_size": 8}  # plain fp32, four micro steps, no workers

Batch = dict[str, torch.Tensor]


class Recordings(torch.utils.data.Dataset[Batch]):
    """Spoken words: `sound` (samples,) in float32 and `letters` (letters,), made when they are asked for."""

    def __len__(self) -> int:
        return RECORDINGS

    def __getitem__(self, index: int) -> Batch:
        random = np.random.default_rng(index)
        low, high = NUM_LETTERS
        letters = 1 + random.integers(LETTERS - 1, size=low + int((high - low + 1) * random.beta(1.5, 3)))
        time = np.arange(LETTER_SAMPLES) / RATE
        pitch = 200 + 90 * letters[:, None]
        sound = np.sin(2 * np.pi * pitch * time) + 0.5 * np.sin(2 * np.pi * 1.5 * pitch * time)
        sound = sound.ravel() + 0.3 * random.standard_normal(sound.size)
        return {"sound": torch.from_numpy(sound.astype(np.float32)), "letters": torch.from_numpy(letters)}


def train_dataset() -> torch.utils.data.Dataset[Batch]:
    return Recordings()


def collate_fn(samples: list[Batch]) -> Batch:
    """Pad to the longest recording and the longest word of the batch, and keep the lengths."""
    sounds, letters = [sample["sound"] for sample in samples], [sample["letters"] for sample in samples]
    return {
        "sound": pad_sequence(sounds, batch_first=True),
        "num_samples": torch.tensor([len(sound) for sound in sounds]),
        "letters": pad_sequence(letters, batch_first=True),
        "num_letters": torch.tensor([len(word) for word in letters]),
    }


class FrameNorm(nn.LayerNorm):
    """LayerNorm over the channels of each frame of (batch, channels, frames): padding changes nothing elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class SeparableBlock(nn.Module):
    """A depthwise convolution over time and a pointwise one, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 11, padding=5, groups=WIDTH)
        self.norm = FrameNorm(WIDTH)
        self.pointwise = nn.Sequential(nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GELU(), nn.Conv1d(2 * WIDTH, WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pointwise(self.norm(self.depthwise(x)))


class Speller(nn.Module):
    """Sound (batch, samples) to logits of letters (batch, frames, LETTERS)."""

    def __init__(self) -> None:
        super().__init__()
        stem: list[nn.Module] = []
        for index, stride in enumerate(STRIDES):
            in_channels = 1 if index == 0 else WIDTH // 2
            out_channels = WIDTH if index == len(STRIDES) - 1 else WIDTH // 2
            conv = nn.Conv1d(in_channels, out_channels, 2 * stride, stride, padding=stride // 2)
            stem += [conv, FrameNorm(out_channels), nn.GELU()]
        self.stem = nn.Sequential(*stem)
        self.blocks = nn.Sequential(*(SeparableBlock() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(sound[:, None])).transpose(1, 2))


def build_model() -> nn.Module:
    return Speller()


def training_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """CTC (Graves et al., 2006), each recording's loss divided by its letters, then the mean over the recordings."""
    log_shares = model(batch["sound"]).float().log_softmax(dim=-1).transpose(0, 1)
    num_frames = log_shares.shape[0] * batch["num_samples"] // batch["sound"].shape[1]
    return F.ctc_loss(log_shares, batch["letters"], num_frames, batch["num_letters"])


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
