"""The model file that `autotune init` writes: commented, and it runs as it is."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import TaskError

TEMPLATE = '''\
"""What autotune is to tune. It runs as it is: put your own model and data in place of these.

    autotune search {name}
"""

import torch
from torch import nn

NUM_CLASSES = 10


class Block(nn.Module):
    """A residual block; a list of equal blocks is what activation checkpointing works on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        expand, contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.layers = nn.Sequential(nn.LayerNorm(width), expand, nn.GELU(), contract)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Net(nn.Module):
    def __init__(self, num_features: int = 64, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(num_features, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def build_model(variant: str = "base") -> nn.Module:
    """A new model, on the CPU. Required; it takes an argument only where VARIANTS names several."""
    return Net(width=128 if variant == "base" else 64)


def make_batch(batch_size: int):
    """A batch of the largest shape that training will meet, on the CPU. Required, unless there is train_dataset().

    Tensors in a tuple, list, dict or dataclass, or a list of samples, or whatever your loss takes: it is believed.
    Here: x of shape (batch_size, 32, 64), y of shape (batch_size,).
    """
    return torch.randn(batch_size, 32, 64), torch.randint(NUM_CLASSES, (batch_size,))


# All that follows is optional.

# The loss of a batch, as a scalar mean. Without it: a dict batch is called as model(**batch) and the output's `loss` is
# taken; a pair (x, y) gives cross entropy for integer y and mean squared error for floating y.
#
# def training_step(model, batch):
#     x, y = batch
#     return nn.functional.cross_entropy(model(x), y)

# A whole optimizer step of your own instead, where one loss and one optimizer are not enough (two networks, say). It is
# run as it is; `optimizers` is what configure_optimizers returns: one, or a tuple, list or dict of several.
#
# def train_step(model, optimizers, batch):
#     x, y = batch
#     loss = nn.functional.cross_entropy(model(x), y)
#     optimizers.zero_grad()
#     loss.backward()
#     optimizers.step()
#     return loss

# The optimizer. Without it: torch.optim.AdamW over all that requires a gradient.
#
# def configure_optimizers(model):
#     return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# The training set, instead of make_batch or beside it: makes data loading part of the search.
#
# def train_dataset():
#     return torch.utils.data.TensorDataset(torch.randn(4096, 32, 64), torch.randint(NUM_CLASSES, (4096,)))
#
# def collate_fn(samples):
#     return torch.utils.data.default_collate(samples)

# What activation checkpointing may recompute. Without it: the largest chain of equal blocks.
#
# def checkpoint_blocks(model):
#     return list(model.blocks)

# How many terms the mean loss of a batch averages over, where that is not its number of samples (unpadded tokens, say).
#
# def loss_weight(batch):
#     return int((batch[1] != -100).sum())

# What to evaluate, where it is not the loss, and on what data, where it is not the training set. With EVAL, or `--eval`,
# the search finds the batch size for that as well.
#
# def eval_step(model, batch):
#     x, y = batch
#     scores = model(x)
#     return {{"loss": nn.functional.cross_entropy(scores, y), "accuracy": (scores.argmax(-1) == y).float().mean()}}
#
# def eval_dataset():
#     return torch.utils.data.TensorDataset(torch.randn(512, 32, 64), torch.randint(NUM_CLASSES, (512,)))
#
# def eval_collate_fn(samples):  # where it is not collate_fn
#     return torch.utils.data.default_collate(samples)
#
# EVAL = True

# Samples per optimizer step. When given, it never changes: the search splits it into micro batches.
# GLOBAL_BATCH = 256

# What you run today: the search starts from it and reports the gain over it.
# BASELINE = {{"batch_size": 32}}

# Gradients are clipped to this norm before each optimizer step.
# MAX_GRAD_NORM = 1.0

# Architectures to search side by side, each for itself: build_model gets one of these names.
# VARIANTS = ["base", "light"]

# Modules or parameters that may be left untrained: `--include freeze` searches each choice for itself.
# FREEZE = ["embed", "embed+blocks.0"]
'''


def write_template(path: str | Path) -> None:
    """Write the starting model file.

    Raises:
        TaskError: the file exists already, the folder does not, or the name does not end in `.py`.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise TaskError(f"{path} is a folder; expected the name of a file to write, such as {path / 'model.py'}")
    if path.suffix != ".py":
        raise TaskError(
            f"{path} does not end in .py; expected the name of a Python file, such as {path.with_suffix('.py')}"
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(name=path.name))
    except FileExistsError:
        raise TaskError(
            f"{path} exists already and is left as it is; choose another name, or remove it first"
        ) from None
    except OSError as error:
        raise TaskError(
            f"{path} cannot be written: {error.strerror}; choose a folder that exists and may be written to"
        ) from None
