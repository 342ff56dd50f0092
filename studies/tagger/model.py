"""A tagger on variable-length lines: which words of a lower-cased passage were capitalised?

Every paragraph of the text that ships inside CPython (`pydoc_data.topics`), unwrapped to one line, is a sample: 1 to a few
hundred words. Python code cuts it into words and hashes the character n-grams of each, as fastText does, so that loading
data takes real time; a batch is padded to its widest line, so that memory depends on what is drawn. The default size suits
a two-core CPU. Larger machines set the environment:

    TAGGER_LAYERS        transformer layers                       2
    TAGGER_WIDTH         model width, a multiple of TAGGER_HEADS   96
    TAGGER_HEADS         attention heads                          4
    TAGGER_MAX_WORDS     longer lines are cut here                160
    TAGGER_GLOBAL_BATCH  samples an optimizer step                96
"""

from __future__ import annotations

import os
import re
from pydoc_data.topics import topics
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

LAYERS = int(os.environ.get("TAGGER_LAYERS", "2"))
WIDTH = int(os.environ.get("TAGGER_WIDTH", "96"))
HEADS = int(os.environ.get("TAGGER_HEADS", "4"))
MAX_WORDS = int(os.environ.get("TAGGER_MAX_WORDS", "160"))
NGRAM_LENGTHS = (2, 3, 4, 5, 6)
NGRAMS_PER_WORD = 32  # of longer words the first ones are kept
BUCKETS = 2**14  # bucket 0 is padding
TAGS = 3  # lower case, Capitalised, ALL CAPITALS
IGNORED = -100  # the tag of padding, which cross entropy leaves out

GLOBAL_BATCH = int(os.environ.get("TAGGER_GLOBAL_BATCH", "96"))
BASELINE = {"batch_size": GLOBAL_BATCH // 4}  # plain fp32, four micro steps, no workers

WORD = re.compile(r"\w+|[^\w\s]")

Batch = dict[str, torch.Tensor]


def tag(word: str) -> int:
    """0 for lower case and everything without letters, 1 for a capital first letter, 2 for several capitals only."""
    return 2 if word.isupper() and len(word) > 1 else int(word[0].isupper())


def ngram_buckets(word: str) -> list[int]:
    """Hashed character n-grams of `<word>` in lower case, padded with 0 to NGRAMS_PER_WORD."""
    marked = f"<{word.lower()}>".encode()
    ngrams = [marked[i : i + n] for n in NGRAM_LENGTHS for i in range(len(marked) - n + 1)][:NGRAMS_PER_WORD]
    buckets = [1 + crc32(ngram) % (BUCKETS - 1) for ngram in ngrams]
    return buckets + [0] * (NGRAMS_PER_WORD - len(buckets))


class Passages(torch.utils.data.Dataset[Batch]):
    """The paragraphs: `ngrams` (words, NGRAMS_PER_WORD) and `tags` (words,), made when they are asked for."""

    def __init__(self) -> None:
        paragraphs = (" ".join(p.split()) for text in topics.values() for p in text.split("\n\n"))
        self.lines = [line for line in paragraphs if WORD.search(line)]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Batch:
        words = WORD.findall(self.lines[index])[:MAX_WORDS]
        return {
            "ngrams": torch.tensor([ngram_buckets(word) for word in words]),
            "tags": torch.tensor([tag(word) for word in words]),
        }


def train_dataset() -> torch.utils.data.Dataset[Batch]:
    return Passages()


def collate_fn(samples: list[Batch]) -> Batch:
    """Pad to the widest line of the batch."""
    return {
        "ngrams": pad_sequence([sample["ngrams"] for sample in samples], batch_first=True),
        "tags": pad_sequence([sample["tags"] for sample in samples], batch_first=True, padding_value=IGNORED),
    }


class Tagger(nn.Module):
    """n-gram buckets (batch, words, NGRAMS_PER_WORD) to logits (batch, words, TAGS)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(BUCKETS, WIDTH, mode="sum", padding_idx=0)
        self.position = nn.Embedding(MAX_WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TAGS)

    def forward(self, ngrams: torch.Tensor) -> torch.Tensor:
        is_padding = ngrams[..., 0] == 0
        words = self.embedding(ngrams.flatten(0, 1)).unflatten(0, ngrams.shape[:2])
        positions = torch.arange(ngrams.shape[1], device=ngrams.device)
        return self.head(self.encoder(words + self.position(positions), src_key_padding_mask=is_padding))


def build_model() -> nn.Module:
    return Tagger()


def training_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean over the words of the batch, padding left out."""
    return F.cross_entropy(model(batch["ngrams"]).flatten(0, 1), batch["tags"].flatten(), ignore_index=IGNORED)


def loss_weight(batch: Batch) -> float:
    """Words the mean loss averages over, so that accumulated micro batches of unequal length add up exactly."""
    return float((batch["tags"] != IGNORED).sum())


def configure_optimizers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=5e-4)
