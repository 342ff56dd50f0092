"""The case studies, at a tiny size: what each `model.py` promises to whoever loads it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

STUDIES = Path(__file__).parents[2] / "studies"

TINY = {
    "gpt": {"GPT_LAYERS": "2", "GPT_WIDTH": "32", "GPT_HEADS": "2", "GPT_CONTEXT": "16", "GPT_GLOBAL_BATCH": "8"},
    "digits": {"DIGITS_WIDTH": "8", "DIGITS_DEPTH": "1", "DIGITS_PIXELS": "8", "DIGITS_GLOBAL_BATCH": "16"},
    "tagger": {
        "TAGGER_LAYERS": "1",
        "TAGGER_WIDTH": "16",
        "TAGGER_HEADS": "2",
        "TAGGER_MAX_WORDS": "24",
        "TAGGER_GLOBAL_BATCH": "8",
    },
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"study_{name}", STUDIES / name / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=sorted(TINY))
def study(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for variable, value in TINY[request.param].items():
        monkeypatch.setenv(variable, value)
    torch.manual_seed(0)
    return load(request.param)


@pytest.fixture
def tagger(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for variable, value in TINY["tagger"].items():
        monkeypatch.setenv(variable, value)
    return load("tagger")


def batch_of(study: ModuleType, batch_size: int) -> Any:
    if hasattr(study, "make_batch"):
        return study.make_batch(batch_size)
    dataset = study.train_dataset()
    return study.collate_fn([dataset[int(i)] for i in torch.randint(len(dataset), (batch_size,))])


def loss_of(study: ModuleType, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    if hasattr(study, "training_step"):
        return study.training_step(model, batch)
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def test_a_batch_has_the_size_that_was_asked_for(study: ModuleType) -> None:
    assert {tensor.shape[0] for tensor in tensors_of(batch_of(study, 5))} == {5}


def test_the_baseline_divides_the_global_batch(study: ModuleType) -> None:
    assert study.GLOBAL_BATCH % study.BASELINE["batch_size"] == 0


def test_every_parameter_gets_a_finite_gradient(study: ModuleType) -> None:
    model = study.build_model()
    loss_of(study, model, batch_of(study, 4)).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []


def test_the_optimizer_has_every_parameter_once(study: ModuleType) -> None:
    model = study.build_model()
    groups = study.configure_optimizers(model).param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_loss_falls(study: ModuleType, dtype: torch.dtype) -> None:
    model = study.build_model()
    optimizer = study.configure_optimizers(model)
    losses = []
    for _ in range(60):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            loss = loss_of(study, model, batch_of(study, study.GLOBAL_BATCH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_gpt_predicts_no_byte_from_itself_or_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in TINY["gpt"].items():
        monkeypatch.setenv(variable, value)
    gpt = load("gpt")
    model = gpt.build_model().eval()
    tokens, _ = gpt.make_batch(1)
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % gpt.VOCABULARY
    torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])


def test_tagger_pads_to_the_widest_line_of_the_batch(tagger: ModuleType) -> None:
    samples = [
        {"ngrams": torch.ones(n, tagger.NGRAMS_PER_WORD, dtype=torch.long), "tags": torch.zeros(n)} for n in (3, 7)
    ]
    batch = tagger.collate_fn(samples)
    assert batch["ngrams"].shape == (2, 7, tagger.NGRAMS_PER_WORD)
    assert tagger.loss_weight(batch) == 10


def test_tagger_padding_changes_nothing_for_the_words(tagger: ModuleType) -> None:
    torch.manual_seed(0)
    model = tagger.build_model().eval()
    dataset = tagger.train_dataset()
    short, long = sorted((dataset[i] for i in range(20)), key=lambda sample: len(sample["tags"]))[::19]
    alone = model(tagger.collate_fn([short])["ngrams"])
    beside = model(tagger.collate_fn([short, long])["ngrams"])[:1, : len(short["tags"])]
    torch.testing.assert_close(alone, beside)


@pytest.mark.parametrize(
    ("word", "expected"), [("the", 0), ("The", 1), ("NaN", 1), ("HTTP", 2), ("I", 1), ("(", 0), ("7", 0)]
)
def test_tagger_tags_a_word_by_its_capitals(tagger: ModuleType, word: str, expected: int) -> None:
    assert tagger.tag(word) == expected


def test_tagger_hides_capitals_from_the_model(tagger: ModuleType) -> None:
    assert tagger.ngram_buckets("Python") == tagger.ngram_buckets("python")


def test_gpt_has_the_size_of_gpt_2_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"GPT_LAYERS": "12", "GPT_WIDTH": "768", "GPT_HEADS": "12", "GPT_CONTEXT": "1024", "GPT_VOCABULARY": "50257"}
    for variable, value in size.items():
        monkeypatch.setenv(variable, value)
    study = load("gpt")
    with torch.device("meta"):
        model = study.build_model()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(124.4e6, rel=0.005)
