"""GPT-2 as Hugging Face builds it from its own configuration, without weights from a hub; `GPT2_GLOBAL_BATCH` samples an optimizer step."""

from __future__ import annotations

import os

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH = 512
GLOBAL_BATCH = int(os.environ.get("GPT2_GLOBAL_BATCH", "16"))
BASELINE = {"batch_size": GLOBAL_BATCH // 4}


def build_model() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_positions=LENGTH))


def make_batch(batch_size: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(50257, (batch_size, LENGTH))
    return {"input_ids": tokens, "labels": tokens}
