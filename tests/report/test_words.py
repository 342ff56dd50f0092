"""A config in a few words, and as text to paste."""

from __future__ import annotations

import ast
import json

import pytest

from autotune.records.config import Choice
from autotune.report.answer import as_code, as_json
from autotune.techniques import find_techniques

describe = find_techniques().describe
complete = find_techniques().complete
label_of = find_techniques().label

FULL = complete({"batch_size": 16, "amp": "bf16", "checkpoint_segments": 2, "optimizer_impl": "fused"}, global_batch=48)


def test_a_config_is_described_by_its_batch_and_what_is_on() -> None:
    assert describe(FULL) == "batch 16 x3, bf16, 2 checkpoint segments, fused"
    assert describe(complete({"batch_size": 8})) == "batch 8"


def test_against_a_baseline_only_differences_are_named() -> None:
    assert describe(FULL, FULL.replace(amp="off")) == "bf16"
    assert describe(FULL, FULL.replace(batch_size=48, accumulation_steps=1)) == "batch 16 x3"
    assert describe(FULL, FULL) == "as the baseline"


def test_what_the_baseline_has_on_and_the_config_off_is_named() -> None:
    baseline = complete({"batch_size": 16, "amp": "fp16", "checkpoint_segments": 4, "channels_last": True})
    plain = complete({"batch_size": 16})
    assert describe(plain, baseline) == "fp32, no channels_last, no checkpointing"


@pytest.mark.parametrize(
    ("name", "choice", "words"),
    [
        ("checkpoint_segments", 1, "1 checkpoint segment"),
        ("num_workers", 1, "1 worker"),
        ("num_workers", 4, "4 workers"),
        ("prefetch_factor", 8, "prefetch 8"),
        ("pin_memory", True, "pinned"),
        ("pin_memory", False, "no pin_memory"),
        ("matmul_precision", "highest", "highest matmul"),
        ("optimizer_impl", "default", "default optimizer"),
        ("a_technique_of_tomorrow", "spline", "a_technique_of_tomorrow spline"),
    ],
)
def test_each_technique_has_its_words(name: str, choice: Choice, words: str) -> None:
    assert label_of(name, choice) == words


def test_the_python_literal_builds_the_same_config() -> None:
    text = "\n".join(as_code(FULL, find_techniques(), "config = ").lines(60))
    assert complete(ast.literal_eval(text.removeprefix("config = "))) == FULL
    assert all(len(line) <= 60 for line in text.splitlines()) and len(text.splitlines()) > 1


def test_the_json_builds_the_same_config() -> None:
    choices = complete({"batch_size": 4, "channels_last": True}).as_dict()
    assert complete(json.loads(as_json(choices, find_techniques()))).as_dict() == choices
