"""What other frameworks call a choice is read back as that choice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from autotune.techniques import Phase, find_techniques
from autotune.techniques.frameworks import ACCELERATE, BATCH, DATALOADER, DEEPSPEED, LIGHTNING, TRANSFORMERS

TECHNIQUES = find_techniques()

FRAMEWORKS = (TRANSFORMERS, LIGHTNING, ACCELERATE, DEEPSPEED, DATALOADER)
CHOICES: dict[str, tuple[Any, ...]] = {
    "amp": ("off", "bf16", "fp16"),
    "matmul_precision": ("highest", "tf32"),
    "cudnn_benchmark": (False, True),
    "expandable_segments": (False, True),
    "keep_heap": (False, True),
    "activation_offload": (0, 1, 2, 3),
    "attention": ("default", "sdpa", "flash", "efficient", "cudnn", "math"),
    "channels_last": (False, True),
    "checkpoint_segments": (0, 1, 2, 3),
    "checkpoint_policy": ("full", "selective"),
    "compile": ("off", "default", "reduce-overhead", "max-autotune-no-cudagraphs"),
    "inplace_activations": (False, True),
    "loss_chunks": (False, True),
    "optimizer_impl": ("default", "for-loop", "foreach", "fused"),
    "optimizer_in_backward": (False, True),
    "optimizer_state": ("default", "8bit", "4bit", "cpu"),
    "param_dtype": ("fp32", "bf16", "fp8"),
    "num_workers": (0, 1, 2, 4),
    "pin_memory": (False, True),
    "device_prefetch": (False, True),
    "persistent_workers": (False, True),
    "prefetch_factor": (2, 4, 8, 16),
    "length_bucketing": (False, True),
    "variant": ("none", "small"),
    "freeze": ("none", "encoder", "blocks:2"),
    "bucket_mb": (1, 5, 25, 100, 50),
    "ddp_bucket_view": (False, True),
    "ddp_static_graph": (False, True),
    "shard_dtype": ("fp32", "bf16"),
    "shard_offload": (False, True),
    "sync_batchnorm": (False, True),
    "parallel": ("ddp", "zero1", "fsdp", "fsdp_grad", "hsdp:2"),
}


def sayable() -> Iterator[Any]:
    """Every choice that a framework has words for."""
    for name, choices in CHOICES.items():
        for framework in FRAMEWORKS:
            for choice in choices:
                if TECHNIQUES[name].write(framework, choice, choices, optimizer="AdamW") is not None:
                    yield pytest.param(name, framework, choice, id=f"{framework}-{name}={choice}")


def said(framework: str) -> dict[str, Any]:
    """What every technique's last choice that can be said makes of the framework's arguments."""
    arguments: dict[str, Any] = {}
    for name, choices in CHOICES.items():
        if TECHNIQUES[name].phase is Phase.SPREAD:  # of several processes, or of GPUs
            continue
        written = [TECHNIQUES[name].write(framework, choice, choices, optimizer="AdamW") for choice in choices]
        arguments |= next((words for words in reversed(written) if words is not None), {})
    for words in BATCH.values():
        arguments |= words[framework].write(4) if framework in words else {}
    return arguments


def test_every_technique_is_looked_at() -> None:
    assert CHOICES.keys() == TECHNIQUES.keys()


@pytest.mark.parametrize(("name", "framework", "choice"), list(sayable()))
def test_what_is_written_is_read_back(name: str, framework: str, choice: Any) -> None:
    written = TECHNIQUES[name].write(framework, choice, CHOICES[name], optimizer="AdamW")
    assert written is not None
    others = {"learning_rate": 1e-3, "seed": 42}
    assert TECHNIQUES[name].read(framework, written | others, CHOICES[name]) == choice


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_arguments_that_do_not_speak_of_a_technique_say_nothing(framework: str) -> None:
    says = {name for name, technique in TECHNIQUES.items() if technique.read(framework, {}) is not None}
    assert says <= {"optimizer_impl"}  # whose `default` is whatever optimizer the framework makes


@pytest.mark.parametrize(
    ("name", "framework", "choice"),
    [
        ("checkpoint_segments", TRANSFORMERS, 2),
        ("channels_last", TRANSFORMERS, True),
        ("matmul_precision", LIGHTNING, "tf32"),
        ("optimizer_impl", TRANSFORMERS, "foreach"),
        ("num_workers", ACCELERATE, 2),
    ],
)
def test_what_a_framework_has_no_words_for_is_not_dropped_silently(name: str, framework: str, choice: Any) -> None:
    assert TECHNIQUES[name].write(framework, choice, CHOICES[name]) is None


def test_the_batch_has_names_as_well() -> None:
    for words in BATCH.values():
        for argument in words.values():
            assert argument.read(argument.write(16)) == 16


def test_a_lightning_trainers_short_names_of_precisions_are_read() -> None:
    read = TECHNIQUES["amp"].read
    assert [read(LIGHTNING, {"precision": value}) for value in (None, 32, "bf16", 16)] == ["off", "off", "bf16", "fp16"]
    assert read(LIGHTNING, {"precision": "64-true"}) is None


def test_training_arguments_without_tf32_anywhere_are_read_as_matrix_products_without_it() -> None:
    assert TECHNIQUES["matmul_precision"].read(TRANSFORMERS, {"tf32": False}) == "highest"


def test_training_arguments_take_what_is_written(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # without it they cannot be made
    arguments = said(TRANSFORMERS) | {"tf32": False, "fp16": False, "dataloader_pin_memory": False}
    made = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)
    for name, value in arguments.items():
        assert getattr(made, name) == value


def test_the_frameworks_know_the_arguments_that_are_written() -> None:
    from inspect import signature

    transformers = pytest.importorskip("transformers")
    lightning = pytest.importorskip("lightning")
    from torch.utils.data import DataLoader

    makers = {TRANSFORMERS: transformers.TrainingArguments, LIGHTNING: lightning.Trainer, DATALOADER: DataLoader}
    for framework, maker in makers.items():
        assert said(framework).keys() <= signature(maker).parameters.keys()


def test_accelerate_knows_the_arguments_that_are_written() -> None:
    from inspect import signature

    accelerate = pytest.importorskip("accelerate")
    assert said(ACCELERATE).keys() <= signature(accelerate.Accelerator).parameters.keys()
