"""Evaluation is measured in processes of their own, in the memory limit that training has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.records.config import ProbeSettings
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import EvaluateJob
from autotune.runners.local import LocalRunner
from autotune.runners.replay import ReplayRunner
from autotune.runners.runner import Runner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from tests.room import limit_bytes

techniques = find_techniques()

TESTS = Path(__file__).parent.parent
ROOM_MIB = 150
SETTINGS = ProbeSettings(memory_limit_bytes=limit_bytes(ROOM_MIB), max_timed_s=0.3, max_warmup_s=0.3, timeout_s=30)
GPT = TESTS.parent / "studies" / "gpt" / "cpu.csv"

EXTRA = """
import os
import time


class Inputs(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        return torch.randn(64)


eval_dataset = Inputs


def eval_step(model, batch):
    assert not model.training and torch.is_inference_mode_enabled()
    if len(batch) == 5:
        os.abort()
    if len(batch) == 6:
        time.sleep(60)
    return {"mean": model(batch).mean()}
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("deep")
    (folder / "model.py").write_text((TESTS / "models" / "deep.py").read_text() + EXTRA)
    with LocalRunner(TaskSource.of(folder / "model.py"), device="cpu", logs=folder / "logs") as runner:
        yield runner


def evaluated(runner: Runner, batch_size: int, **changes: object) -> Outcome:
    config = techniques.complete({"batch_size": batch_size, "accumulation_steps": 1})
    return runner.run(EvaluateJob(config=config, settings=SETTINGS.replace(**changes), num_samples=2))


def test_a_batch_that_is_too_large_to_train_on_is_evaluated_within_the_limit(runner: Runner) -> None:
    trained = runner.probe(techniques.complete({"batch_size": 64, "accumulation_steps": 1}), SETTINGS)
    assert trained.kind is Kind.OOM
    found = evaluated(runner, 128).measurement
    assert found is not None and found.peak_bytes <= limit_bytes(ROOM_MIB)
    assert found.samples_per_s_low <= found.samples_per_s <= found.samples_per_s_high
    assert set(found.phases_s) == {"data", "forward"}


def test_a_batch_beyond_the_limit_is_out_of_memory(runner: Runner) -> None:
    assert evaluated(runner, 10_000).kind is Kind.OOM


def test_what_happens_in_the_tasks_own_function_is_an_outcome(runner: Runner) -> None:
    crashed, hung = evaluated(runner, 5), evaluated(runner, 6, timeout_s=2.0)
    assert crashed.kind is Kind.CRASHED and "SIGABRT" in crashed.cause
    assert hung.kind is Kind.TIMEOUT and "killed after" in hung.cause
    assert evaluated(runner, 4).ok


def test_a_recorded_table_says_that_it_holds_none() -> None:
    with ReplayRunner(GPT) as runner:
        found = evaluated(runner, 8)
    assert found.kind is Kind.UNSUPPORTED and "recorded table holds no evaluation" in found.cause
