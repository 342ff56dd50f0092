"""Tasks whose batches are not one tensor with the samples in its first dimension: what real training code has."""

import dataclasses

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from autotune.task import Task

functional = nn.functional


class Detector(nn.Module):
    """Takes a list of images of unequal sizes and a list of dicts, as torchvision's detectors do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.box, self.kind = nn.Linear(8, 4), nn.Linear(8, 5)

    def forward(self, images, targets):
        losses = []
        for image, target in zip(images, targets, strict=True):
            found = self.body(image[None])
            losses.append(functional.mse_loss(self.box(found), target["boxes"].mean(0, keepdim=True)))
            losses.append(functional.cross_entropy(self.kind(found), target["labels"][:1]))
        return {"loss": torch.stack(losses).sum() / len(images)}


def detection(batch_size):
    images = [torch.randn(3, 16 + 2 * (i % 3), 16) for i in range(batch_size)]
    targets = [
        {"boxes": torch.rand(1 + i % 3, 4), "labels": torch.randint(5, (1 + i % 3,)), "image_id": i, "file": f"{i}.png"}
        for i in range(batch_size)
    ]
    return images, targets


class Graphs:
    """Many graphs as one, with a class of its own that moves itself in place."""

    def __init__(self, graphs):
        sizes = torch.tensor([len(nodes) for nodes, _ in graphs])
        self.x = torch.cat([nodes for nodes, _ in graphs])
        self.y = torch.stack([y for _, y in graphs])
        self.graph = torch.repeat_interleave(torch.arange(len(graphs)), sizes)

    def to(self, device):
        self.x, self.y, self.graph = self.x.to(device), self.y.to(device), self.graph.to(device)
        return self


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, batch):
        pooled = torch.zeros(len(batch.y), 8).to(batch.x).index_add(0, batch.graph, self.nodes(batch.x).relu())
        return self.head(pooled).squeeze(1)


def graphs():
    return [(torch.randn(3 + i % 4, 4), torch.randn(())) for i in range(50)]


def packed_rows(batch_size):
    """Rows of 3 to 6 tokens one after the other, as for attention over variable lengths."""
    lengths = torch.tensor([0] + [3 + i % 4 for i in range(batch_size)])
    rows = int(lengths.sum())
    return {
        "tokens": torch.randint(20, (rows,)),
        "cu_seqlens": lengths.cumsum(0).int(),
        "max_seqlen": 6,
        "targets": torch.randint(20, (rows,)),
    }


def packed_step(model, batch):
    return functional.cross_entropy(model(batch["tokens"]), batch["targets"])


class Recurrent(nn.Module):
    def __init__(self, *, batch_first=False):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8, batch_first=batch_first), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.rnn(x)[1][0])


def pair_step(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


@dataclasses.dataclass(frozen=True)
class Clip:
    frames: torch.Tensor
    label: torch.Tensor
    source: str = "camera"
    rate: float = 25.0


def clip_step(model, batch):
    return functional.cross_entropy(model(batch.frames), batch.label) * (batch.rate / 25)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, input_ids, labels, extra=None):
        return {"loss": functional.cross_entropy(self.head(self.embed(input_ids).mean(1)), labels)}


def encoding(batch_size):
    return BatchEncoding(
        {"input_ids": torch.randint(20, (batch_size, 6)), "labels": torch.randint(3, (batch_size,)), "extra": {"n": 1}}
    )


def nested_dicts(batch_size):
    x = {"text": torch.randint(20, (batch_size, 6)), "meta": {"ids": [str(i) for i in range(batch_size)], "epoch": 3}}
    return {"inputs": x, "labels": torch.randint(3, (batch_size,))}


def nested(batch_size, layout):
    rows = [torch.randn(2 + i % 4, 4) for i in range(batch_size)]
    return torch.nested.nested_tensor(rows, layout=layout), torch.randint(3, (batch_size,))


def nested_step(model, batch):
    return functional.cross_entropy(model(batch[0].to_padded_tensor(0.0).sum(1)), batch[1])


# Those that can be cut by the rule of `task/batches.py`, and those that only their maker can cut.
CUT = {
    "lists of images and dicts": Task(
        build_model=Detector, make_batch=detection, training_step=lambda m, b: m(*b)["loss"]
    ),
    "nested dicts": Task(
        build_model=Classifier,
        make_batch=nested_dicts,
        training_step=lambda m, b: m(b["inputs"]["text"], b["labels"])["loss"],
    ),
    "BatchEncoding": Task(build_model=Classifier, make_batch=encoding),
    "dataclass": Task(
        build_model=lambda: nn.Linear(6, 3),
        make_batch=lambda n: Clip(torch.randn(n, 6), torch.randint(3, (n,))),
        training_step=clip_step,
    ),
    "time first": Task(
        build_model=Recurrent,
        make_batch=lambda n: (torch.randn(5, n, 4), torch.randint(3, (n,))),
        training_step=pair_step,
    ),
    "jagged": Task(
        build_model=lambda: nn.Linear(4, 3), make_batch=lambda n: nested(n, torch.jagged), training_step=nested_step
    ),
    "nested": Task(
        build_model=lambda: nn.Linear(4, 3), make_batch=lambda n: nested(n, torch.strided), training_step=nested_step
    ),
}
BELIEVED = {
    "packed rows": Task(
        build_model=lambda: nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)),
        make_batch=packed_rows,
        training_step=packed_step,
        loss_weight=lambda batch: len(batch["tokens"]),
    ),
    "graphs": Task(
        build_model=GraphNet,
        train_dataset=graphs,
        collate_fn=Graphs,
        training_step=lambda m, b: functional.mse_loss(m(b), b.y),
    ),
    "PackedSequence": Task(
        build_model=Recurrent,
        make_batch=lambda n: (pack_sequence([torch.randn(5, 4)] * n), torch.randint(3, (n,))),
        training_step=pair_step,
    ),
}
TASKS = CUT | BELIEVED
__all__ = ["BELIEVED", "CUT", "TASKS"]
