"""Plain training may not fit at all: that is a finding, and techniques may make the model fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.records.config import Config, ProbeSettings
from autotune.records.inspection import Inspection
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import InspectJob, NotCompared
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.tuning import opening, why
from autotune.tuning.clearance import Clearance
from autotune.tuning.events import Listener
from autotune.tuning.explore import explore, measure_baseline
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection, make_search
from tests.notes import Notes

pytestmark = pytest.mark.usefixtures("measured_once")

MODEL = """
import torch
from torch import nn

GLOBAL_BATCH = 2
BASELINE = {"batch_size": 2}


class Block(nn.Module):  # keeps 8 MiB of two samples for its backward pass, and hands 256 KiB on
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return x + torch.tanh(x.unsqueeze(-1) * self.scale).mean(-1)


def build_model():
    return nn.Sequential(*(Block() for _ in range(12)))


def make_batch(batch_size):
    return torch.randn(batch_size, 2**15), torch.randn(batch_size, 2**15)


def training_step(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()
"""


@pytest.mark.slow  # a minute; `test_shortage.py` and `coupling/test_searches.py` hold it in a closed form
def test_a_model_whose_plain_step_does_not_fit_is_made_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))  # what is freed is free: no fragments in the heap
    (tmp_path / "model.py").write_text(MODEL)
    source = TaskSource.of(tmp_path / "model.py")
    with LocalRunner(source, device="cpu", logs=tmp_path / "logs") as runner:
        plain = runner.run(InspectJob(memory_limit_bytes=None, timeout_s=100.0))
    assert isinstance(plain, Inspection) and not plain.shortage and plain.step_s
    options = SearchOptions.of(
        {
            "device": "cpu",
            "budget": "10m",
            "storage": str(tmp_path / "tight.db"),
            "memory_limit": plain.outside_bytes + 80 * 2**20,
            "fix": {"batch_size": 2},
            "exclude": ["amp"],
            "trials": 2,
        },
        total_bytes=lambda device: 2**34,
    )
    listener = Notes()
    with opening.open_search(source, options, None, listener) as search:
        assert "an allocation of" in search.inspection.shortage and search.inspection.step_s is None
        assert search.inspection.support["checkpoint_segments"].choices[-1] == 12
        assert "can't allocate" not in " ".join(search.inspection.unsupported.values())
        measure_baseline(search)
        assert search.history.baseline is not None and search.history.baseline.kind is Kind.OOM
        explore(search, search.proposer())
        assert search.history.best is not None and int(search.history.best[0]["checkpoint_segments"]) > 0
    assert any("2 samples of plain training do not fit" in text for text in listener.texts)


def test_an_unstated_baseline_is_not_probed_at_sizes_that_the_inspection_ruled_out(tmp_path: Path) -> None:
    found = inspection(baseline_given=False, shortage="an allocation of 2.00 GiB failed")
    search = make_search(tmp_path, runner := ClosedFormRunner(), inspection=found)
    measure_baseline(search)
    assert [config.batch_size for config in runner.configs] == [1]


def test_gradients_are_compared_outside_of_a_limit_that_plain_training_exceeds(tmp_path: Path) -> None:
    limits = []

    class Checking(ClosedFormRunner):
        def check_of(self, config: Config, settings: ProbeSettings, batch_size: int) -> Outcome | NotCompared:
            limits.append(settings.memory_limit_bytes)
            return (
                Outcome(kind=Kind.OOM) if settings.memory_limit_bytes == LIMIT_BYTES else NotCompared(reason="not here")
            )

    search = make_search(tmp_path, Checking(), inspection=inspection())
    clearance, fused = Clearance(search), search.history.space.complete({"optimizer_impl": "fused"})
    assert clearance.clear(fused)
    found = clearance.of_answer(fused)
    assert found.reason == "not here" and limits == [LIMIT_BYTES, search.runner.slots()[0].device.free_bytes]


def test_where_few_samples_are_an_error_gradients_are_compared_on_the_baselines_batch(tmp_path: Path) -> None:
    sizes = []

    class Checking(ClosedFormRunner):
        def check_of(self, config: Config, settings: ProbeSettings, batch_size: int) -> NotCompared:
            sizes.append(batch_size)
            return NotCompared(reason="not here")

    for samples in (2, 6):
        folder = tmp_path / str(samples)
        folder.mkdir()
        search = make_search(folder, Checking(), inspection=inspection(step_samples=samples))
        Clearance(search).clear(search.history.space.complete({"optimizer_impl": "fused"}))
    assert sizes == [4, 6]


LARGE = """
import torch

BASELINE = {"batch_size": 2}


def build_model():
    return torch.nn.Linear(4096, 4096)  # 64 MiB


def make_batch(batch_size):
    return torch.randn(batch_size, 4096), torch.randn(batch_size, 4096)
"""


@pytest.mark.slow  # two processes; `test_shortage.py` holds the rule
def test_where_the_model_alone_exceeds_the_limit_the_predicted_need_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(LARGE)
    source = TaskSource.of(tmp_path / "model.py")
    with LocalRunner(source, device="cpu", logs=tmp_path / "logs") as runner:
        plain = runner.run(InspectJob(memory_limit_bytes=None, timeout_s=100.0))
    assert isinstance(plain, Inspection)
    limit = {"memory_limit": plain.outside_bytes + 40 * 2**20, "storage": str(tmp_path / "large.db")}
    options = SearchOptions.of(
        {"device": "cpu", "budget": "10m", "trials": 1, **limit}, total_bytes=lambda device: 2**34
    )
    with opening.open_search(source, options, None, Listener()) as search:
        assert "an allocation of" in search.inspection.shortage
        measure_baseline(search)
        explore(search, search.proposer())
        assert "the smallest config is predicted to need about" in why.nothing(
            search.history, search.cost_model, search.inspection, search.refused
        )
