"""What torch's caching allocator reserves for whole training steps, recorded over the played cards, against its prediction.

    PLAYED_CUDNN_WORKSPACE_MIB=0 python -m tests.driver python -m tests.benchmarks.reserved record [MODEL...]     with torch's CUDA build
    python -m tests.benchmarks.reserved                                    anywhere

The allocator's figures are torch's own; no GPU has any part in them. cuDNN's workspaces are unknown to a played card, so
networks of convolutions train with the channels last, where torch makes no guess at them.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from autotune.devices import open_device
from autotune.devices.kernels.cuda_workspaces import cublas_workspaces
from autotune.devices.targets import Target, gpu_of, target_of
from autotune.prediction.anatomy import anatomies
from autotune.prediction.job import trace_plan
from autotune.prediction.memory import ON_GPU
from autotune.prediction.traces import Traces, plan_traces
from autotune.recovery import RAISE
from autotune.runners.worker import hide_gpus
from autotune.session import Session, prepare
from autotune.task import Task, load_task
from autotune.task.batches import StepBatch
from autotune.techniques import find_techniques
from autotune.units import MIB

techniques = find_techniques()

RECORDED = Path(__file__).parent / "reserved.json"
STUDIES = Path(__file__).parent.parent.parent / "studies"
NUM_STEPS = 3
VOCABULARY, LENGTH, CLASSES = 2000, 128, 10


@dataclass(frozen=True, kw_only=True)
class Row:
    """One config of one model on one card: bytes at the peak of three steps."""

    model: str
    config: dict[str, Any]
    target: Target
    reserved_bytes: int
    requested_bytes: int


def tokens(batch_size: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch_size, LENGTH))


def images(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, 3, 64, 64), torch.randint(CLASSES, (batch_size,))


def clicks(batch_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randint(50_000, (batch_size, 4)), torch.randn(batch_size, 13), torch.rand(batch_size)


def of_labels(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def of_classes(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


class UNet(nn.Module):
    """Two levels, whose skip connection is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = self._block(3, 32), self._block(32, 64), self._block(96, 32)
        self.up, self.head = nn.Upsample(scale_factor=2), nn.Conv2d(32, 3, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.first(x)
        coarse = self.second(F.avg_pool2d(fine, 2))
        return self.head(self.third(torch.cat([fine, self.up(coarse)], 1)))


class Recommender(nn.Module):
    """Embeddings of categories beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50_000, 64)
        self.tower = nn.Sequential(
            nn.Linear(4 * 64 + 13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.tower(torch.cat([self.embedding(ids).flatten(1), numbers], 1)).squeeze(1)


class Encoder(nn.Module):
    """Torch's own transformer, whose attention takes inputs that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, dim_feedforward=1024, batch_first=True)
        self.embedding, self.layers = nn.Embedding(VOCABULARY, 256), nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids)))


def _hugging_face(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**sizes)).train()

    return build


def _gpt2() -> Callable[[], nn.Module]:
    sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    return _hugging_face("GPT2LMHeadModel", "GPT2Config", **sizes)


def _bert() -> Callable[[], nn.Module]:
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    return _hugging_face("BertForMaskedLM", "BertConfig", vocab_size=VOCABULARY, **sizes)


def _vit() -> Callable[[], nn.Module]:
    sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
    return _hugging_face(
        "ViTForImageClassification", "ViTConfig", image_size=64, patch_size=8, num_labels=CLASSES, **sizes
    )


def _resnet() -> Callable[[], nn.Module]:
    sizes = {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
    return _hugging_face("ResNetForImageClassification", "ResNetConfig", num_labels=CLASSES, **sizes)


TASKS: Mapping[str, Callable[[], Task]] = {
    "gpt": lambda: load_task(STUDIES / "gpt" / "model.py"),
    "digits": lambda: load_task(STUDIES / "digits" / "model.py"),
    "tagger": lambda: load_task(STUDIES / "tagger" / "model.py"),
    "GPT-2": lambda: Task(build_model=_gpt2(), make_batch=tokens, training_step=of_labels),
    "BERT": lambda: Task(build_model=_bert(), make_batch=tokens, training_step=of_labels),
    "ViT": lambda: Task(build_model=_vit(), make_batch=images, training_step=of_classes),
    "ResNet": lambda: Task(build_model=_resnet(), make_batch=images, training_step=of_classes),
    "U-Net": lambda: Task(
        build_model=UNet, make_batch=lambda n: images(n)[0], training_step=lambda model, x: F.mse_loss(model(x), x)
    ),
    "encoder": lambda: Task(
        build_model=Encoder,
        make_batch=tokens,
        training_step=lambda model, ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
    ),
    "recommender": lambda: Task(
        build_model=Recommender,
        make_batch=clicks,
        training_step=lambda model, b: F.binary_cross_entropy_with_logits(model(b[0], b[1]), b[2]),
    ),
}
SIZES = {
    "gpt": (12, 48),
    "digits": (48, 192),
    "tagger": (24, 96),
    "GPT-2": (8, 32),
    "BERT": (8, 32),
    "ViT": (16, 64),
    "ResNet": (16, 64),
    "U-Net": (8, 32),
    "encoder": (8, 32),
    "recommender": (512, 4096),
}
CONVOLUTIONS = ("ResNet", "U-Net", "digits")
FIXED_STEPS = ("gpt", "digits", "tagger")  # of as many samples at any batch size: the smaller one accumulates
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"amp": "bf16"},
    {"expandable_segments": True},
    {"amp": "bf16", "expandable_segments": True},
    {"optimizer_impl": "fused"},
)
OF_BLOCKS: tuple[dict[str, Any], ...] = (
    {"checkpoint_segments": 2},
    {"checkpoint_segments": 2, "amp": "bf16"},
    {"checkpoint_segments": 2, "expandable_segments": True},
)
OF_TWO_BLOCKS = ("tagger",)
# of the larger batch alone: what a search combines
PAIRS: tuple[dict[str, Any], ...] = (
    {"optimizer_impl": "for-loop"},
    {"amp": "bf16", "optimizer_impl": "fused"},
    {"amp": "bf16", "optimizer_impl": "fused", "expandable_segments": True},
    {"accumulation_steps": 2},
    {"amp": "bf16", "accumulation_steps": 2, "expandable_segments": True},
)
PAIRS_OF_BLOCKS: tuple[dict[str, Any], ...] = (
    {"checkpoint_segments": 4},
    {"checkpoint_segments": 2, "amp": "bf16", "optimizer_impl": "fused"},
    {"checkpoint_segments": 4, "amp": "bf16", "optimizer_impl": "fused", "expandable_segments": True},
)


def configs_of(model: str) -> Iterator[dict[str, Any]]:
    """Config dicts that are recorded of a model."""
    has_blocks = model not in ("recommender", "U-Net", "digits")
    every_size = (*CHOICES, *(OF_BLOCKS if has_blocks else ()))
    pairs = [*PAIRS, *(PAIRS_OF_BLOCKS if has_blocks else ())]
    if model in FIXED_STEPS:
        pairs = [choices for choices in pairs if "accumulation_steps" not in choices]
    if model in OF_TWO_BLOCKS:
        pairs = [choices for choices in pairs if choices.get("checkpoint_segments", 0) <= 2]
    layout = {"channels_last": True} if model in CONVOLUTIONS else {}
    small, large = SIZES[model]
    for batch_size, choices in itertools.product((small, large), every_size):
        yield {"batch_size": batch_size, **layout, **choices}
    for choices in pairs:
        yield {"batch_size": large, **layout, **choices}


def train_on_widest(session: Session) -> None:
    """Take a few steps on the widest samples, which a prediction is of. Those of an epoch may be narrower."""
    size, number = session.config.batch_size, session.config.accumulation_steps
    widest = session.task.batch(size)
    for _ in range(NUM_STEPS):
        session.step(StepBatch([(widest, size)] * number))


def measured(model: str, config: dict[str, Any]) -> Row:
    """Train for a few steps in this process, on the first GPU."""
    task, device = TASKS[model](), open_device("cuda")
    device.enter()
    complete = techniques.complete(config, global_batch=task.global_batch)
    session = prepare(task, complete, device=device, on_oom=RAISE)
    train_on_widest(session)
    device.synchronize()
    return Row(
        model=model,
        config=config,
        target=target_of(device.info()),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        requested_bytes=torch.cuda.memory_stats()["requested_bytes.all.peak"],
    )


class Predicted(NamedTuple):
    """Of one row, in bytes.

    Attributes:
        reserved_bytes: what `predict` and a search expect the allocator to reserve before any probe.
        explained_bytes: the same by `explain`, which traces the config itself.
        requested_bytes: the most that is asked of the allocator at once, also by `explain`.
    """

    reserved_bytes: int
    explained_bytes: int
    requested_bytes: int


def predicted(model: str, rows: list[Row]) -> list[Predicted]:
    """The predictions of a model's rows."""
    task = TASKS[model]()
    configs = [techniques.complete(row.config, global_batch=task.global_batch) for row in rows]
    traces = Traces(target=rows[0].target)
    for message in trace_plan(task, plan_traces(configs, find_techniques()), rows[0].target):
        if "traces" in message:
            traces = traces.merged(Traces.from_dict(json.loads(json.dumps(message["traces"]))))
    found, held_bytes = [], sum(cublas_workspaces(gpu_of(rows[0].target)))
    for config, anatomy in zip(configs, anatomies(task, configs, rows[0].target, techniques), strict=True):
        peak = traces.peak(config, techniques)
        assert peak is not None and not isinstance(anatomy, str), (model, config, traces.failures, anatomy)
        expected = round(ON_GPU.total_bytes(peak))
        found.append(Predicted(expected, anatomy.reserved_bytes, anatomy.peak_bytes + held_bytes))
    return found


def recorded() -> list[Row]:
    """The rows that are kept."""
    return [Row(**row) for row in json.loads(RECORDED.read_text(encoding="utf-8"))]


def in_forks(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each of `works` returns, as JSON, from a process of its own that has imported what this one has, all at a time.

    Raises:
        RuntimeError: one of them failed, and has printed why. The others, which may wait for it, are ended.
    """
    running: dict[Any, tuple[int, int]] = {}  # what is read from a process -> its place and its number
    for place, work in enumerate(works):
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            try:
                with os.fdopen(writing, "w") as told:
                    json.dump(work(), told)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(writing)
        running[os.fdopen(reading)] = place, pid
    found = [""] * len(works)
    try:
        while running:
            for told in wait([*running]):
                place, pid = running.pop(told)
                with told:
                    found[place] = told.read()
                if os.waitpid(pid, 0)[1]:
                    raise RuntimeError(f"process {place} of {len(works)} failed; what it printed tells why")
    finally:
        for told, (_, pid) in running.items():
            told.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return list(map(json.loads, found))


def record(models: Sequence[str]) -> None:
    """Measure every row of these models, and keep those of others."""
    works = [
        lambda model=model, config=config: asdict(measured(model, config))
        for model in models
        for config in configs_of(model)
    ]
    rows = [in_forks([work])[0] for work in works]
    rows = [asdict(row) for row in recorded() if row.model not in models] + rows
    RECORDED.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n", encoding="utf-8")


def show() -> None:
    """Print each row with its predictions, and what they come to."""
    hide_gpus()
    errors: list[tuple[float, float, float]] = []
    for model in TASKS:
        rows = [row for row in recorded() if row.model == model]
        of_model = []
        for row, found in zip(rows, predicted(model, rows), strict=True):
            error = (
                found.reserved_bytes / row.reserved_bytes - 1,
                found.explained_bytes / row.reserved_bytes - 1,
                found.requested_bytes / row.requested_bytes - 1,
            )
            of_model.append(error)
            print(
                f"{model:12} {json.dumps(row.config):120} {row.reserved_bytes / MIB:6.0f} MiB, predicted {error[0]:+.1%}, "
                f"explained {error[1]:+.1%}, requested {error[2]:+.2%}"
            )
        _sum_up(model, of_model)
        errors += of_model
    _sum_up("all", errors)


def _sum_up(name: str, errors: list[tuple[float, float, float]]) -> None:
    for what, found in zip(("predicted", "explained", "requested"), zip(*errors, strict=True), strict=True):
        sum_up(name, what, found)


def sum_up(name: str, what: str, errors: Sequence[float]) -> None:
    """Print what relative errors of one kind come to."""
    sizes = sorted(map(abs, errors))
    print(
        f"{name}, {len(errors)} rows, {what}: median {sizes[len(sizes) // 2]:.2%}, 95 % within "
        f"{sizes[int(0.95 * len(sizes))]:.2%}, from {min(errors):+.2%} to {max(errors):+.2%}"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["record"]:
        record(sys.argv[2:] or list(TASKS))
    else:
        show()
