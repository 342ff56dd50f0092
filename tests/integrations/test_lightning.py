"""Lightning modules, datamodules and trainers are tuned as they stand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune.errors import TaskError
from autotune.session import prepare
from autotune.task import Task
from autotune.task.loading import load_source
from autotune.task.source import TaskSource
from tests.integrations.answers import FACTS, LAUNCHED, known, run_as_printed, shown
from tests.integrations.test_base import CLASSES, FEATURES, dataset, net
from tests.notes import Notes

lightning = pytest.importorskip("lightning")
from autotune.integrations import lightning as integration  # noqa: E402

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.seen: list[tuple[int, torch.dtype]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        logits = self.net(batch[0])
        self.seen.append((len(batch[0]), logits.dtype))
        loss = torch.nn.functional.mse_loss(
            logits.float(), torch.nn.functional.one_hot(batch[1] % CLASSES, CLASSES).float()
        )
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class Data(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
    def __init__(self, batch_size: int = 4, number: int = 192) -> None:
        super().__init__()
        self.batch_size, self.number = batch_size, number

    def setup(self, stage: str) -> None:
        self.order = torch.randperm(3)
        self.samples = dataset(self.number)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True)


def trainer_of(folder: Path, **changes: Any) -> Any:
    usual = {"max_epochs": 1, "accumulate_grad_batches": 24, "default_root_dir": folder}
    return lightning.Trainer(**{**QUIET, **usual, **changes})


def in_a_probe(task: Task, folder: Path) -> Task:
    return load_source(TaskSource.of(task).hand_over(folder))


@pytest.mark.parametrize("cls", [Module, Manual])
def test_a_probe_takes_the_step_that_the_trainer_takes(cls: type[Module], tmp_path: Path) -> None:
    """Every sample is in the one step."""
    module, steps = cls(), 4 if cls is Module else 1
    data = Data(batch_size=64 // steps, number=64)
    clip = {"gradient_clip_val": 0.05} if cls is Module else {}
    trainer = trainer_of(tmp_path, accumulate_grad_batches=steps, **clip)
    task = in_a_probe(integration.task_of(module, data, trainer), tmp_path)
    session = prepare(task, task.baseline or {}, device="cpu")
    session.step(next(iter(session.loader)))
    assert not module.seen and not hasattr(data, "samples") and module._trainer is None
    trainer.fit(module, data)
    for ours, theirs in zip(session.model.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


class Asking(Module):
    """Reads what Lightning's own tutorials read of the trainer, in each place where they do."""

    def setup(self, stage: str) -> None:
        self.total = self.trainer.estimated_stepping_batches

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == 0 and self.trainer.is_global_zero:
            self.logger.experiment.add_image("drawn", batch[0][0], self.current_epoch)
        self.log("rate", self.lr_schedulers().get_last_lr()[0])
        self.log("momentum", self.optimizers().param_groups[0]["momentum"])
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=self.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"max_epochs": 3}, 6), ({"max_epochs": None, "max_steps": 5}, 5), ({"limit_train_batches": 24}, 1)],
)
def test_a_module_that_reads_its_trainer_finds_a_stand_in(changes: Any, expected: int, tmp_path: Path) -> None:
    """192 samples in batches of 4, 24 of them a step. Nothing is logged."""
    trainer = trainer_of(tmp_path / "runs", logger=True, **changes)
    task = in_a_probe(integration.task_of(Asking(), Data(), trainer), tmp_path)
    session = prepare(task, task.baseline or {}, device="cpu")
    session.step(next(iter(session.loader)))
    assert session.model.total == expected and not (tmp_path / "runs").exists()


def test_asking_a_datamodule_draws_none_of_the_users_random_numbers(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    task = integration.task_of(Module(), Data(), trainer_of(tmp_path, precision="bf16-mixed"))
    torch.manual_seed(0)  # as `net` has left it
    assert torch.equal(torch.get_rng_state(), before) or task.baseline is not None
    assert task.global_batch == 96 and task.baseline is not None
    assert {"batch_size": 4, "accumulation_steps": 24, "amp": "bf16", "num_workers": 0}.items() <= task.baseline.items()


def test_the_answer_is_in_the_words_of_trainer_and_dataloader(tmp_path: Path) -> None:
    found = integration.tune(Module(), Data(), trainer_of(tmp_path), **known(tmp_path))
    module, size = Module(), found.dataloader["batch_size"]
    assert found.trainer["precision"] == "bf16-mixed" and size * found.trainer["accumulate_grad_batches"] == 96
    trainer = lightning.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path, **found.trainer)
    trainer.fit(module, DataLoader(dataset(192), shuffle=True, **found.dataloader))
    assert trainer.global_step == 2 and set(module.seen) == {(size, torch.bfloat16)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(dataset(192))


@pytest.mark.parametrize("given", [("datamodule", "trainer"), ("trainer", "train_dataloaders"), ("datamodule",)])
def test_the_lines_that_are_printed_after_a_search_run_what_was_measured(given: Any, tmp_path: Path) -> None:
    loader = DataLoader(dataset(96), batch_size=4)
    made = {"datamodule": Data(), "trainer": trainer_of(tmp_path), "train_dataloaders": loader}
    names = {name: made[name] for name in given}
    if "trainer" in names:
        names["trainer"].accumulate_grad_batches = 24
    options = known(tmp_path) | ({} if "trainer" in names else {"global_batch": 96})
    integration.tune(module := Module(), **names, **options)
    text = shown(tmp_path)
    assert run_as_printed(text, module=module, **names).config.samples_per_step == 96
    assert f"autotune export {tmp_path / 'closed.db'} --study closed --to lightning" in text


def test_of_a_stream_the_answer_says_nothing_of_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_stream = replace(FACTS, parts=("train_dataset", "IterableDataset"))
    monkeypatch.setattr("tests.integrations.answers.FACTS", of_stream)
    loader = DataLoader(Stream(), batch_size=4)
    found = integration.tune(Module(), None, trainer_of(tmp_path), loader, **known(tmp_path))
    size = found.dataloader["batch_size"]
    assert "shuffle" not in found.dataloader and size * found.trainer["accumulate_grad_batches"] == 96


def as_lists(samples: list[Any]) -> list[Any]:
    return [torch.stack(column) for column in zip(*samples, strict=True)]


class Validated(Data):
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset(10), batch_size=2, collate_fn=as_lists)


def test_a_batch_size_for_the_validation_loader_is_found_if_asked(tmp_path: Path) -> None:
    found = integration.tune(Module(), Validated(), trainer_of(tmp_path), eval=True, **known(tmp_path))
    assert found.result.evaluation is not None and found.result.evaluation.eval_batch_size


class Searched:
    """In place of a search: what is searched is kept, and the answer is known."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tasks: list[Task] = []
        search = integration.search

        def keeping(task: Task, *args: Any, **options: Any) -> Any:
            self.tasks.append(task)
            return search(task, *args, **options)

        monkeypatch.setattr(integration, "search", keeping)

    @property
    def validates(self) -> tuple[int, Any]:
        """Samples of what is validated on, and what batches them."""
        assert self.tasks[-1].eval_dataset is not None
        return len(self.tasks[-1].eval_dataset()), self.tasks[-1].eval_collate_fn


@pytest.mark.parametrize("by", ["tune", "callback", "callback with a loader given to fit"])
def test_validation_is_on_the_validation_loaders_samples_in_its_batches(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = Searched(monkeypatch)
    if by == "tune":
        integration.tune(Module(), Validated(), trainer_of(tmp_path), eval=True, **known(tmp_path))
        assert searched.validates == (10, as_lists)
        return
    callback = integration.AutotuneCallback(eval=True, **known(tmp_path))
    trainer = trainer_of(tmp_path, callbacks=[callback])
    if by == "callback":
        trainer.fit(Module(), datamodule=Validated())
        assert searched.validates == (10, as_lists)
    else:
        trainer.fit(Loading(), val_dataloaders=DataLoader(dataset(6), batch_size=2, collate_fn=as_lists))
        assert searched.validates == (6, as_lists)
    assert callback.result is not None and callback.result.evaluation is not None


class Loading(Module):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset(192), batch_size=self.batch_size, shuffle=True)


def test_without_one_validation_loader_what_is_trained_on_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = Searched(monkeypatch)
    integration.tune(Module(), Data(), trainer_of(tmp_path), eval=True, **known(tmp_path))
    assert searched.tasks[-1].eval_dataset is None


def test_the_callback_sets_the_answer_before_fit(tmp_path: Path) -> None:
    module, data = Module(), Data()
    trainer = trainer_of(tmp_path, callbacks=[integration.AutotuneCallback(**known(tmp_path))])
    trainer.fit(module, data)
    assert data.batch_size != 4 and data.batch_size * trainer.accumulate_grad_batches == 96
    assert trainer.global_step == 2 and set(module.seen) == {(data.batch_size, torch.bfloat16)}
    assert trainer.precision == "bf16-mixed"


class FromHparams(Data):
    """Its training loader is made from `per_device`, which `setup` takes from its hyperparameters, as lightning-hydra-template does."""

    def __init__(self) -> None:
        super().__init__()
        del self.batch_size
        self.save_hyperparameters({"batch_size": 4})

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.per_device = self.hparams.batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=self.per_device, shuffle=True)


class MadeInSetup(Data):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.loader = super().train_dataloader()

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader


class OfItsOwn(Data):
    """Reads another attribute than the module's hyperparameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=4, shuffle=True)


@pytest.mark.parametrize("cls", [FromHparams, MadeInSetup, OfItsOwn])
def test_a_batch_size_that_would_not_reach_the_training_loader_is_refused_before_the_search(
    cls: type[Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = Searched(monkeypatch)
    module, data = Module(), cls()
    module.save_hyperparameters({"batch_size": 2})
    trainer = trainer_of(tmp_path, callbacks=[integration.AutotuneCallback(**known(tmp_path))])
    with pytest.raises(
        TaskError, match=r"batch_size set to 8, to try it, the training loader still has batch_size=4.*batch_arg_name"
    ):
        trainer.fit(module, datamodule=data)
    assert not searched.tasks and trainer.accumulate_grad_batches == 24 and module.hparams["batch_size"] == 2
    assert cls is not FromHparams or data.hparams["batch_size"] == 4, "it is as it was"


def test_the_attribute_that_the_training_loader_is_made_from_can_be_named(tmp_path: Path) -> None:
    module, data = Module(), FromHparams()
    trainer = trainer_of(tmp_path, callbacks=[integration.AutotuneCallback("per_device", **known(tmp_path))])
    trainer.fit(module, datamodule=data)
    assert data.per_device * trainer.accumulate_grad_batches == 96 and trainer.global_step == 2
    assert {size for size, _ in module.seen} == {data.per_device}


class SetUpLate(Loading):
    """A module, whose `setup` follows the callback's."""

    def setup(self, stage: str) -> None:
        self.size = self.batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(dataset(192), batch_size=self.size, shuffle=True)


def test_a_module_may_read_the_batch_size_in_its_setup(tmp_path: Path) -> None:
    module = SetUpLate()
    trainer = trainer_of(tmp_path, callbacks=[integration.AutotuneCallback(**known(tmp_path))])
    trainer.fit(module)
    assert module.size != 4 and module.size * trainer.accumulate_grad_batches == 96 and trainer.global_step == 2


class Validating(Module):
    """Notes after how many optimizer steps it is validated."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def validation_step(self, batch: Any, index: int) -> None:
        if index == 0:
            self.validated.append(self.trainer.global_step)


@pytest.mark.parametrize(
    ("number", "counted", "num_steps", "validated"),
    [
        (192, {"limit_train_batches": 24}, 1, [1]),
        (192, {"overfit_batches": 24}, 1, [1]),
        (192, {"limit_train_batches": 0.5}, 1, [1]),
        (192, {"val_check_interval": 24}, 2, [1, 2]),
        (192, {"val_check_interval": 24, "check_val_every_n_epoch": None}, 2, [1, 2]),
        (100, {"val_check_interval": 25}, 2, [2]),  # the end of the epoch, wherever that is
        (100, {"val_check_interval": 15, "limit_train_batches": 15}, 1, [1]),
    ],
)
def test_an_epoch_and_the_places_of_validation_are_as_long_as_the_trainer_says_whatever_the_micro_batch(
    number: int, counted: dict[str, Any], num_steps: int, validated: list[int], tmp_path: Path
) -> None:
    """Today 24 micro batches of 4 are a step."""
    module, data = Validating(), Validated(number=number)
    callback = integration.AutotuneCallback(**known(tmp_path))
    trainer = trainer_of(tmp_path, callbacks=[callback], num_sanity_val_steps=0, **counted)
    trainer.fit(module, datamodule=data)
    assert data.batch_size > 4 and trainer.global_step == num_steps and module.validated == validated


def test_tune_says_what_the_trainer_counts_in_micro_batches_of_the_answer(tmp_path: Path) -> None:
    counted = {"limit_train_batches": 48, "val_check_interval": 24}
    found = integration.tune(Module(), Data(number=960), trainer_of(tmp_path, **counted), **known(tmp_path))
    said, size = found.trainer, found.dataloader["batch_size"]
    assert size != 4 and (said["limit_train_batches"], said["val_check_interval"]) == (192 // size, 96 // size)
    found = integration.tune(Module(), Data(), trainer_of(tmp_path, overfit_batches=24), **known(tmp_path))
    assert found.trainer["overfit_batches"] == 96 // size and "limit_train_batches" not in found.trainer
    shares = {"limit_train_batches": 0.5, "val_check_interval": 0.25}
    found = integration.tune(Module(), Data(), trainer_of(tmp_path, **shares), **known(tmp_path))
    assert found.trainer.keys().isdisjoint(shares)


def test_a_count_that_is_no_whole_number_of_the_answers_micro_batches_keeps_the_steps_of_an_epoch_and_is_told(
    tmp_path: Path,
) -> None:
    notes, data = Notes(), Data(number=960)
    callback = integration.AutotuneCallback(**{**known(tmp_path), "listeners": [notes]})
    trainer = trainer_of(tmp_path, callbacks=[callback], limit_train_batches=49, val_check_interval=25)
    trainer.fit(Module(), datamodule=data)
    size = data.batch_size
    assert trainer.global_step == 3, "two of 96 samples, and a smaller one"
    assert (trainer.limit_train_batches, trainer.val_check_interval) == (-(-196 // size), 100 // size)
    limit, interval = (text for text in notes.warnings if " micro batches of 4 samples become" in text)
    assert limit.startswith("limit_train_batches=49") and "as many optimizer steps as before" in limit
    assert f"validates after every {100 // size * size} samples instead of 100" in interval


class Prepared(Data):
    """Counts how often its data is prepared, in copies too."""

    number_of_times = 0

    def prepare_data(self) -> None:
        type(self).number_of_times += 1


def test_data_is_prepared_once_where_fit_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prepared, "number_of_times", 0)
    trainer_of(tmp_path, callbacks=[integration.AutotuneCallback(**known(tmp_path))]).fit(Module(), Prepared())
    assert Prepared.number_of_times == 1
    integration.task_of(Module(), Prepared(), trainer_of(tmp_path))
    assert Prepared.number_of_times == 2, "nobody has prepared it before the trainer runs"


def test_what_ddp_is_told_is_the_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = lightning.pytorch.strategies.DDPStrategy(bucket_cap_mb=100, gradient_as_bucket_view=True)
    trainer = trainer_of(tmp_path, devices=2, strategy=strategy, sync_batchnorm=True)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    baseline = integration.task_of(Module(), Data(), trainer).baseline or {}
    assert baseline["bucket_mb"] == 100 and baseline["ddp_bucket_view"] and baseline["sync_batchnorm"]


def test_what_cannot_be_tuned_is_refused_with_the_next_step(tmp_path: Path) -> None:
    tune = integration.tune
    with pytest.raises(TaskError, match=r"Module has no train_dataloader\(\); give tune\(\) a datamodule"):
        tune(Module())
    with pytest.raises(TaskError, match="precision is '64-true'; expected '32-true'"):
        tune(Module(), Data(), trainer_of(tmp_path, precision="64-true"))
    with pytest.raises(TaskError, match=r"clips gradients by value.*configure_gradient_clipping"):
        tune(Module(), Data(), trainer_of(tmp_path, gradient_clip_val=1.0, gradient_clip_algorithm="value"))
    scheduler = lightning.pytorch.callbacks.GradientAccumulationScheduler
    with pytest.raises(TaskError, match=r"by epoch \(\{0: 1, 4: 2\}\).*leave it out.*accumulate_grad_batches="):
        tune(Module(), Data(), trainer_of(tmp_path, accumulate_grad_batches=1, callbacks=[scheduler({0: 1, 4: 2})]))
    once = integration.task_of(
        Module(), Data(), trainer_of(tmp_path, accumulate_grad_batches=1, callbacks=[scheduler({0: 1})])
    )
    assert once.global_batch == 4, "it changes nothing"
    with pytest.raises(TaskError, match=r"2 devices, and 1 process runs so far; use AutotuneCallback.*torchrun"):
        tune(Module(), Data(), trainer_of(tmp_path, devices=2, strategy="ddp"))
    callback = integration.AutotuneCallback("size", **known(tmp_path))
    with pytest.raises(TaskError, match="attribute size; make the loader from one, or name it"):
        trainer_of(tmp_path, callbacks=[callback]).fit(Module(), Data())
    callback.result = integration.tune(Module(), Data(), trainer_of(tmp_path), **known(tmp_path)).result
    with pytest.raises(TaskError, match=r"given to fit\(\); give a datamodule"):
        trainer_of(tmp_path, callbacks=[callback]).fit(Module(), DataLoader(dataset(), batch_size=FEATURES))
    assert callback.result is None, "an earlier fit's says nothing of this one"


def test_other_hyperparameters_make_another_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)

    def digest(optimizer: str) -> str:
        module = Module()
        module.save_hyperparameters({"optimizer": optimizer})
        return TaskSource.of(integration.task_of(module, train_dataloaders=DataLoader(dataset()))).script_digest()

    assert digest("sgd") == digest("sgd") != digest("adam")
