"""Techniques that are one setting of a GPU: `cudnn_benchmark`, `expandable_segments`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.techniques import UnsupportedError, find_techniques
from autotune.techniques.cudnn_benchmark import CudnnBenchmark
from autotune.techniques.expandable_segments import ExpandableSegments, _set, _settings

from .gpus import GPU
from .kinds import KINDS

keep_settings = find_techniques().keep_settings


def test_convolutions_on_a_gpu_have_cudnns_benchmark(make_setting: Any) -> None:
    assert CudnnBenchmark().support(make_setting(KINDS["residual"](), device=GPU)).choices == (False, True)
    assert "no convolution" in CudnnBenchmark().support(make_setting(KINDS["frozen"](), device=GPU)).reason
    assert "NVIDIA" in CudnnBenchmark().support(make_setting(KINDS["residual"]())).reason


def test_code_that_benchmarks_itself_has_no_choice(make_setting: Any) -> None:
    with keep_settings():
        torch.backends.cudnn.benchmark = True
        support = CudnnBenchmark().support(make_setting(KINDS["unet"](), device=GPU))
    assert support.choices == (False,) and support.reason == "your code switches it on itself"


def test_cudnns_benchmark_can_be_put_back(make_task: Any) -> None:
    with keep_settings():
        prepare(make_task(lambda: nn.Linear(8, 4)), {"cudnn_benchmark": True}, device="cpu")
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark


def test_gpus_have_expandable_segments(make_setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = []
    monkeypatch.setattr("autotune.techniques.expandable_segments._settings", lambda: "".join(settings))
    assert ExpandableSegments().support(make_setting(KINDS["frozen"](), device=GPU)).choices == (False, True)
    settings.append("max_split_size_mb:64, expandable_segments:True")
    assert "environment" in ExpandableSegments().support(make_setting(KINDS["frozen"](), device=GPU)).reason
    assert ExpandableSegments().support(make_setting(KINDS["frozen"]())).choices == (False,)


def test_a_torch_that_does_not_know_the_newer_variable_is_not_taken_to_follow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert _settings() == ""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert _settings() == "max_split_size_mb:64"


def test_a_cpu_has_no_allocator_to_set(make_task: Any) -> None:
    with pytest.raises(UnsupportedError, match="NVIDIA"):
        prepare(make_task(lambda: nn.Linear(8, 4)), {"expandable_segments": True}, device="cpu")


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell them")
def test_the_users_own_allocator_settings_stay() -> None:
    class Built:
        device = GPU

    before = _settings()
    with keep_settings():
        _set("max_split_size_mb:64")
        ExpandableSegments().apply(Built(), True)  # type: ignore[arg-type]
        assert _settings() == "max_split_size_mb:64,expandable_segments:True"
    assert _settings() == before
