"""Lightning by its other name: what comes from `pytorch_lightning` is tuned with its classes, whether `lightning` is there or not."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune.errors import TaskError
from autotune.session import prepare
from autotune.task import load_task
from autotune.task.loading import load_source
from autotune.task.source import TaskSource
from tests.integrations.answers import known
from tests.integrations.test_base import CLASSES, dataset, net
from tests.integrations.test_lightning import QUIET
from tests.integrations.test_lightning import Data as OthersData
from tests.integrations.test_lightning import trainer_of as others_trainer

pl = pytest.importorskip("pytorch_lightning")
lightning = pytest.importorskip("lightning")
from autotune.integrations import lightning as integration  # noqa: E402

BEGINNING = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None  # as where it is not installed
"""
SCRIPT = """
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from autotune.integrations.lightning import AutotuneCallback, tune  # before Lightning, as sorted imports have it
import pytorch_lightning as pl
from tests.integrations.answers import known

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.batch_size = torch.nn.Linear(8, 4), 4

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(192, 8), torch.arange(192) % 4), batch_size=self.batch_size)

quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
quiet |= {"enable_model_summary": False, "max_epochs": 1, "accumulate_grad_batches": 24}
module, trainer = Module(), pl.Trainer(callbacks=[AutotuneCallback(**known(Path("callback")))], **quiet)
Path("callback").mkdir()
trainer.fit(module)
print(trainer.precision, module.batch_size * trainer.accumulate_grad_batches)
Path("tune").mkdir()
print(tune(Module(), trainer=pl.Trainer(**quiet), **known(Path("tune"))).trainer["precision"])
print(sys.modules.get("lightning"))
"""
MODEL = """
import {name} as pl
import torch

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch, index):
        self.log("loss", loss := torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        samples = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64) % 4)
        return torch.utils.data.DataLoader(samples, batch_size=8)
"""


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(
            self.net(batch[0]).float(), torch.nn.functional.one_hot(batch[1] % CLASSES, CLASSES).float()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
    def __init__(self, batch_size: int = 4, number: int = 192) -> None:
        super().__init__()
        self.batch_size, self.number = batch_size, number

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset(self.number), batch_size=self.batch_size, shuffle=True)


def trainer_of(folder: Path, **changes: Any) -> Any:
    usual = {"max_epochs": 1, "accumulate_grad_batches": 24, "default_root_dir": folder}
    return pl.Trainer(**{**QUIET, **usual, **changes})


def run(script: str, folder: Path, hidden: list[str]) -> subprocess.CompletedProcess[str]:
    text = BEGINNING.format(hidden=hidden) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=False)


def test_a_probe_takes_the_step_that_the_trainer_takes(tmp_path: Path) -> None:
    """Every sample is in the one step."""
    module, data = Module(), Data(batch_size=16, number=64)
    trainer = trainer_of(tmp_path, accumulate_grad_batches=4, gradient_clip_val=0.05)
    task = load_source(TaskSource.of(integration.task_of(module, data, trainer)).hand_over(tmp_path))
    session = prepare(task, task.baseline or {}, device="cpu")
    session.step(next(iter(session.loader)))
    trainer.fit(module, data)
    for ours, theirs in zip(session.model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_callback_is_one_of_each_lightning_and_sets_the_answer_before_fit(tmp_path: Path) -> None:
    callback, data = integration.AutotuneCallback(**known(tmp_path)), Data()
    assert isinstance(callback, pl.Callback) and isinstance(callback, lightning.Callback)
    trainer = trainer_of(tmp_path, callbacks=[callback])
    trainer.fit(Module(), data)
    assert data.batch_size != 4 and data.batch_size * trainer.accumulate_grad_batches == 96
    assert trainer.global_step == 2 and trainer.precision == "bf16-mixed"
    assert type(trainer.strategy.precision_plugin).__module__.startswith("pytorch_lightning.")


class Own(integration.AutotuneCallback):
    """A user's own callback of this kind."""


def test_the_callback_is_copied_and_pickled_as_what_the_user_named() -> None:
    callback = Own(budget="3s")
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert isinstance(other, Own) and type(other) is type(callback) and other._options == {"budget": "3s"}


def test_parts_of_both_are_refused_with_what_to_do(tmp_path: Path) -> None:
    expected = "module is of pytorch_lightning, the {} of lightning, which do not work together; import both"
    with pytest.raises(TaskError, match=expected.format("Trainer")):
        integration.tune(Module(), Data(), others_trainer(tmp_path))
    with pytest.raises(TaskError, match=expected.format("datamodule")):
        integration.tune(Module(), OthersData(), trainer_of(tmp_path))
    with pytest.raises(TaskError, match=r"was given a Sequential; expected a LightningModule"):
        integration.tune(net())  # type: ignore[arg-type]


def test_accumulation_steps_that_change_by_epoch_are_refused(tmp_path: Path) -> None:
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 4: 2})
    trainer = trainer_of(tmp_path, accumulate_grad_batches=1, callbacks=[scheduler])
    with pytest.raises(TaskError, match=r"\{0: 1, 4: 2\}.*give Trainer\(accumulate_grad_batches="):
        integration.tune(Module(), Data(), trainer)


@pytest.mark.parametrize(
    "hidden",
    [
        pytest.param([], id="both are installed", marks=pytest.mark.slow),
        pytest.param(["lightning"], id="it alone is installed", marks=pytest.mark.slow),
    ],
)
def test_a_script_is_tuned_whose_lightning_has_this_name(hidden: list[str], tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path, hidden)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["bf16-mixed 96", "bf16-mixed", "None"]


def test_without_either_the_error_says_what_to_install(tmp_path: Path) -> None:
    done = run("import autotune.integrations.lightning", tmp_path, ["lightning", "pytorch_lightning"])
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ModuleNotFoundError")]
    assert "pip install lightning" in line and "pip install pytorch-lightning" in line


@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning", "lightning.pytorch"])
def test_a_file_with_a_module_of_either_name_is_a_task(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(name=name))
    task = load_task(tmp_path / "model.py")
    session = prepare(task, {"batch_size": 8}, device="cpu")
    before = [parameter.clone() for parameter in session.model.parameters()]
    session.step(next(iter(session.loader)))
    assert not any(map(torch.equal, before, session.model.parameters()))
