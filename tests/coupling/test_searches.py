"""A search never cuts a batch whose samples the loss couples, however much faster that would be, whoever starts it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import autotune
from autotune.errors import ConfigError
from autotune.integrations import loops
from autotune.records.inspection import Inspection
from autotune.runners.jobs import InspectJob
from autotune.runners.local import LocalRunner
from autotune.task import Task
from autotune.task.source import TaskSource
from tests.coupling.losses import (
    WIDTH,
    Language,
    cross_entropy,
    encoder,
    info_nce,
    labelled,
    sentences,
    tokens_of_the_batch,
    views,
)
from tests.coupling.searches import RewardsCutting, rewarding_cutting
from tests.short_play_off import AUTOTUNE

torch.set_num_threads(1)
WHOLE = 24


def searched(task: Task, folder: Path, **options: Any) -> tuple[autotune.Result, RewardsCutting]:
    known = rewarding_cutting(task, folder)
    return autotune.search(task, **{**known, **options}), known["runner"]


def task_with(step: Callable[..., Any] = info_nce, make_batch: Any = views, **fields: Any) -> Task:
    usual = {"build_model": encoder, "global_batch": WHOLE, "configure_optimizers": sgd}
    return Task(**{**usual, "training_step": step, "make_batch": make_batch, **fields})


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plans(runner: RewardsCutting) -> set[tuple[int, int]]:
    return {(config.batch_size, config.accumulation_steps) for config in runner.configs}


def test_a_loss_that_couples_samples_gets_the_global_batch_whole_and_it_is_said_why(tmp_path: Path) -> None:
    result, runner = searched(task_with(), tmp_path)
    assert plans(runner) == {(WHOLE, 1)}
    assert result.coupling is not None and result.coupling.verdict == "coupled"
    (said,) = [warning for warning in result.warnings if "couples the samples" in warning]
    assert "so the batch is not cut into micro batches: --include accumulation_steps allows" in said


def test_a_mean_over_samples_is_cut_as_before(tmp_path: Path) -> None:
    result, runner = searched(task_with(cross_entropy, labelled), tmp_path)
    assert result.config["batch_size"] < WHOLE and len(plans(runner)) > 1
    assert not any("micro batches" in warning for warning in result.warnings)


@pytest.mark.parametrize("fix", [{}, {"batch_size": 4}])
def test_the_user_may_have_it_cut_and_the_answer_says_what_that_is(tmp_path: Path, fix: dict[str, Any]) -> None:
    result, _ = searched(task_with(), tmp_path, include=("accumulation_steps",), fix=fix)
    assert result.config["batch_size"] < WHOLE
    assert any("compare validation results" in w and "couples the samples" in w for w in result.warnings)


def test_fixing_a_micro_batch_alone_does_not_have_it_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"couples the samples.*--include accumulation_steps"):
        searched(task_with(), tmp_path, fix={"batch_size": 4})


def test_accumulation_that_the_baseline_states_is_kept_as_it_is(tmp_path: Path) -> None:
    _, runner = searched(task_with(baseline={"batch_size": 8}), tmp_path)
    assert plans(runner) == {(8, 3)}


def test_without_a_global_batch_the_batch_stays_what_the_user_runs(tmp_path: Path) -> None:
    result, runner = searched(task_with(global_batch=None, baseline={"batch_size": 8}), tmp_path)
    assert plans(runner) == {(8, 1)}
    assert any("so the batch stays at 8: --include batch_size allows" in warning for warning in result.warnings)
    _, runner = searched(
        task_with(global_batch=None, baseline={"batch_size": 8}), tmp_path / "included", include=("batch_size",)
    )
    assert len(plans(runner)) > 1


def test_a_mean_over_other_terms_is_cut_once_they_are_counted(tmp_path: Path) -> None:
    task = task_with(tokens_of_the_batch, sentences, build_model=Language)
    result, runner = searched(task, tmp_path / "as it is")
    assert plans(runner) == {(WHOLE, 1)}
    assert any("a loss_weight(batch) that returns the number of terms" in warning for warning in result.warnings)
    counted = replace(task, loss_weight=lambda ids: float(ids[:, 1:].ne(0).sum()))
    assert len(plans(searched(counted, tmp_path / "counted")[1])) > 1


def ragged(number: int) -> dict[str, torch.Tensor]:
    lengths = torch.arange(number) % 3 + 1
    return {"x": torch.randn(int(lengths.sum()), WIDTH), "ends": lengths.cumsum(0)}


def of_ragged(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    rows = torch.tensor_split(model(batch["x"]), batch["ends"][:-1])
    return torch.stack([row.pow(2).mean() for row in rows]).mean()


def test_what_nobody_could_compare_is_cut_only_where_it_is_asked_for(tmp_path: Path) -> None:
    task = task_with(of_ragged, ragged)
    result, runner = searched(task, tmp_path)
    assert plans(runner) == {(WHOLE, 1)}
    assert any("only the task itself can make smaller batches" in warning for warning in result.warnings)
    _, runner = searched(task, tmp_path / "included", include=("accumulation_steps",))
    assert len(plans(runner)) > 1


class TooLarge(RewardsCutting):
    def peak_bytes(self, config: Any) -> int:
        small = config["checkpoint_segments"] > 0 or config.batch_size < WHOLE
        return 2**20 * (100 if small else 10**6)


def test_what_does_not_fit_is_checkpointed_and_not_cut(tmp_path: Path) -> None:
    task = task_with(build_model=Deep)
    runner = TooLarge(task=task)
    result, _ = searched(task, tmp_path, runner=runner)
    assert plans(runner) == {(WHOLE, 1)} and result.config["checkpoint_segments"] > 0


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(6))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 4 * WHOLE

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(position)
        x = torch.randn(WIDTH, generator=made)
        return x, x + 0.1 * torch.randn(WIDTH, generator=made)


def in_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(a)))


def test_a_loop_keeps_its_batch(tmp_path: Path) -> None:
    model = torch.nn.Linear(WIDTH, WIDTH)
    loader = DataLoader(Pairs(), batch_size=WHOLE, shuffle=True)
    known = rewarding_cutting(loops.task_of(model, loader, in_batch, sgd(model)), tmp_path)
    tuned = loops.tune(model, loader, in_batch, sgd(model), **known)
    assert tuned.loader.batch_size == WHOLE and plans(known["runner"]) == {(WHOLE, 1)}


def test_a_task_of_a_loops_parts_keeps_its_batch(tmp_path: Path) -> None:
    model = torch.nn.Linear(WIDTH, WIDTH)
    task = Task.from_loader(model, DataLoader(Pairs(), batch_size=WHOLE), in_batch, sgd(model))
    assert plans(searched(task, tmp_path)[1]) == {(WHOLE, 1)}


def test_a_lightning_module_with_negatives_from_the_batch_trains_on_the_whole_of_it(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from autotune.integrations import lightning as integration

    class SimCLR(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch_size, self.seen = encoder(), WHOLE, set()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen.add(len(batch[0]))
            return in_batch(self.net(batch[0]), self.net(batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Pairs(), batch_size=self.batch_size, drop_last=True)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    given = {**quiet, "accelerator": "cpu", "max_epochs": 1, "default_root_dir": tmp_path}
    module = SimCLR()
    known = rewarding_cutting(integration.task_of(module, None, lightning.Trainer(**given)), tmp_path)
    callback = integration.AutotuneCallback(**known)
    trainer = lightning.Trainer(callbacks=[callback], **given)
    trainer.fit(module)
    assert plans(known["runner"]) == {(WHOLE, 1)}
    assert module.seen == {WHOLE} and trainer.accumulate_grad_batches == 1
    assert callback.result is not None and any("couples the samples" in w for w in callback.result.warnings)


def test_a_trainer_whose_loss_has_negatives_from_the_batch_trains_on_the_whole_of_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from autotune.integrations import transformers as integration

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = encoder()

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": in_batch(self.net(first), self.net(second))}

    class Named(Pairs):
        def __getitem__(self, position: int) -> Any:
            return dict(zip(("first", "second"), super().__getitem__(position), strict=True))

    class SimCLR(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return model(**inputs)["loss"]

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=WHOLE, report_to="none", disable_tqdm=True, use_cpu=True,
        save_strategy="no", remove_unused_columns=False,
    )  # fmt: skip
    trainer = SimCLR(model=Encoder(), args=args, train_dataset=Named())
    known = rewarding_cutting(integration.task_of(trainer), tmp_path)
    found = integration.tune(trainer, **known)
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (WHOLE, 1)
    assert plans(known["runner"]) == {(WHOLE, 1)}


HANGS = """
import os
import time

import torch
from torch import nn

GLOBAL_BATCH = 64


def build_model():
    return nn.Linear(8, 4)


def make_batch(n):
    return torch.randn(n, 8), torch.randint(4, (n,))


def training_step(model, batch):
    if len(batch[0]) > 2:
        {}
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""


@pytest.mark.parametrize("what", [pytest.param("time.sleep(3600)", marks=pytest.mark.slow), "os.abort()"])
def test_a_task_whose_larger_batches_hang_or_crash_is_inspected_all_the_same(tmp_path: Path, what: str) -> None:
    (tmp_path / "model.py").write_text(HANGS.format(what))
    with LocalRunner(TaskSource.of(tmp_path / "model.py"), logs=tmp_path / "logs", device="cpu") as runner:
        found = runner.run(InspectJob(memory_limit_bytes=None, timeout_s=100, comparing_s=0.2))
    assert isinstance(found, Inspection) and found.coupling is not None
    assert (
        found.coupling.verdict == "unknown"
        and "during comparing a batch with its micro batches" in found.coupling.reason
    )
    assert found.batch.accumulation_steps == (1,) and found.batch.stays_whole


MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

GLOBAL_BATCH = 64


def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def make_batch(n):
    x = torch.randn(n, 8)
    return x, x + 0.1 * torch.randn(n, 8)


def training_step(model, batch):
    a, b = (F.normalize(model(view), dim=-1) for view in batch)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))
"""


@pytest.mark.slow  # what is above holds it without a process
def test_the_command_line_probes_nothing_but_the_whole_global_batch(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    asked = ["search", "model.py", "--device", "cpu", "--budget", "30s", "--trials", "3", "--study", "s"]
    command = [*AUTOTUNE, *asked]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "batch is not cut into micro batches" in " ".join(ended.stdout.split())
    (database,) = tmp_path.glob("studies/*.db")
    frame = autotune.load_study(database).frame()
    assert set(frame["batch_size"]) == {64}
