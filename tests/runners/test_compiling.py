"""A config that compiles does so in a process before its probe, beyond the memory limit, into the cache beside the study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.devices.cpu import CpuDevice
from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import ProbeJob
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.room import limit_bytes

techniques = find_techniques()

# What inductor takes a minute for is left out; a file stands for what it would leave in the cache.
MODEL = """
import os, time
from pathlib import Path
import torch
from torch import nn
from autotune.techniques import compile as technique

technique.BACKEND = "aot_eager"

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))

def build_model():
    cache = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    if cache.name.startswith("view-"):
        kept = sorted(path.name for path in cache.glob("made-*"))
        print("found", *kept, flush=True)
        (cache / f"made-{len(kept)}").touch()
    time.sleep(float(os.environ.get("SLOW_MODEL_S", "0")))
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(8, 4))

def make_batch(n):
    return torch.randn(n, 8), torch.randint(0, 4, (n,))
"""
CONFIG = techniques.complete({"batch_size": 4, "compile": "default"})
SETTINGS = ProbeSettings(memory_limit_bytes=limit_bytes(800), max_timed_s=0.2, max_warmup_s=0.2, timeout_s=60)


def runner_of(folder: Path, model: str = MODEL, **changes: Any) -> LocalRunner:
    file = folder / "model.py"
    file.write_text(model)
    runner = LocalRunner(TaskSource.of(file), device="cpu", logs=folder / "logs", **changes)
    runner.keep_compiled(folder / "compiled")
    return runner


def found_in(outcome: Outcome) -> list[str]:
    return [line for line in Path(outcome.log).read_text().splitlines() if line.startswith("found")]


def test_a_probe_finds_what_a_process_before_it_compiled_and_the_same_config_is_not_compiled_again(
    tmp_path: Path,
) -> None:
    with runner_of(tmp_path) as runner:
        first, again = runner.probe(CONFIG, SETTINGS), runner.probe(CONFIG, SETTINGS)
        plain = runner.probe(CONFIG.replace(compile="off"), SETTINGS)
    assert found_in(first) == ["found", "found made-0"]
    assert found_in(again) == ["found made-0 made-1"]
    assert first.measurement is not None and again.measurement is not None
    assert 0 < first.measurement.compile_cold_s < first.compiling_s < first.wall_s
    assert (again.measurement.compile_cold_s, again.compiling_s) == (first.measurement.compile_cold_s, 0.0)
    assert first.measurement.compile_s > 0 and first.measurement.num_graph_breaks == 0
    assert plain.ok and not plain.log  # there was nothing to compile


def test_each_folder_has_what_was_compiled_for_it_and_the_time_that_this_took(tmp_path: Path) -> None:
    with runner_of(tmp_path) as runner:
        runner.submit(ProbeJob(config=CONFIG, settings=SETTINGS))
        runner.keep_compiled(tmp_path / "other")
        finished = runner.collect()
        assert finished is not None
        first, other = finished.result, runner.probe(CONFIG, SETTINGS)
        runner.keep_compiled(tmp_path / "compiled")
        again = runner.probe(CONFIG, SETTINGS)
    assert found_in(first) == found_in(other) == ["found", "found made-0"]
    assert found_in(again) == ["found made-0 made-1"]
    assert other.compiling_s > 0 and other.measurement.compile_cold_s != first.measurement.compile_cold_s
    assert (again.measurement.compile_cold_s, again.compiling_s) == (first.measurement.compile_cold_s, 0.0)


def test_a_time_out_while_it_compiles_says_so_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_MODEL_S", "60")
    with runner_of(tmp_path) as runner:
        outcome = runner.probe(CONFIG, SETTINGS.replace(timeout_s=3))
    assert (outcome.kind, outcome.stage) == (Kind.TIMEOUT, "compiling") and outcome.compiling_s > 2
    assert not [path for path in (tmp_path / "compiled").rglob("*") if path.is_file()]


@pytest.mark.slow  # a process; a time-out ends in the same stage
def test_what_fails_while_it_is_compiled_is_the_outcome_and_is_not_run(tmp_path: Path) -> None:
    failing = MODEL.replace(
        "return x + torch.tanh", "assert False, 'cannot be compiled'\n        return x + torch.tanh"
    )
    with runner_of(tmp_path, failing) as runner:
        outcome = runner.probe(CONFIG, SETTINGS)
    assert (outcome.kind, outcome.stage) == (Kind.ERROR, "compiling") and "cannot be compiled" in outcome.cause
    assert len(found_in(outcome)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fork", [True, False])
def test_generated_code_comes_from_the_cache_within_a_limit_that_the_compiler_exceeds(
    tmp_path: Path, fork: bool
) -> None:
    if reason := CpuDevice().why_not_compiled():
        pytest.skip(reason)
    inductor = MODEL.replace('"aot_eager"', '"inductor"')
    with runner_of(tmp_path, inductor, fork=fork) as runner:
        cold = runner.probe(CONFIG, SETTINGS.replace(timeout_s=800))
        cached = runner.probe(CONFIG, SETTINGS.replace(timeout_s=800))
    assert cold.measurement is not None and cached.measurement is not None, (cold, cached)
    assert cold.measurement.compile_cold_s > 2 * cached.measurement.compile_s
    assert cached.measurement.peak_bytes <= 1.1 * cold.measurement.peak_bytes
