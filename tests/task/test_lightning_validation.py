"""A LightningModule is validated as its trainer would: `validation_step`, its hooks, its metrics, its own loader."""

import math

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from autotune import prepare
from autotune.errors import TaskError
from autotune.task import Task
from autotune.task.facts import gather_facts


def samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, generator=generator), i % 3) for i in range(number)]


class Plain(pl.LightningModule):
    """Validated by nothing of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(samples(12, seed=0), batch_size=4)


class Data(Plain):
    """Has a loader to validate on. One batch in three is smaller than the others."""

    def val_dataloader(self):
        return DataLoader(samples(10, seed=1), batch_size=4, collate_fn=self.collate)

    def collate(self, members):
        return torch.stack([x for x, _ in members]), torch.tensor([y for _, y in members])


class Lit(Data):
    """Logs means, a metric, and a figure of its own after the last batch."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def on_validation_epoch_start(self):
        self.sizes = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        scores = self.net(x)
        self.sizes.append(len(x))
        self.accuracy(scores, y)
        self.log("val_loss", functional.cross_entropy(scores, y), prog_bar=True, sync_dist=True)
        self.log_dict({"val_accuracy": self.accuracy, "ones": 1}, on_epoch=True)
        self.log("of_the_last_step", 5.0, on_step=True, on_epoch=False)
        self.log("samples", len(x), reduce_fx="sum")

    def on_validation_epoch_end(self):
        self.log("samples_seen", float(sum(self.sizes)))


def test_evaluation_is_what_the_trainer_logs_of_validation():
    module = Lit()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    (logged,) = trainer.validate(module, verbose=False)
    session = prepare(Task(build_model=Lit), {"batch_size": 4}, device="cpu")
    found = session.evaluate()
    del logged["samples"]
    assert found == pytest.approx(logged) and {"val_loss", "val_accuracy", "samples_seen"} < found.keys()
    assert session.evaluate(batch_size=7) == pytest.approx(found), "nothing is left of the first time"
    assert session.step(next(iter(session.loader))).isfinite() and session.model.training


class LogsNowAndThen(Data):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx != 1:
            self.log("now_and_then", functional.cross_entropy(self.net(x), y))
        self.log("always", float(batch_idx))


def test_what_is_logged_in_some_batches_by_their_number_is_the_mean_over_those():
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    (logged,) = pl.Trainer(accelerator="cpu", enable_model_summary=False, **options).validate(
        LogsNowAndThen(), verbose=False
    )
    session = prepare(Task(build_model=LogsNowAndThen), {"batch_size": 4}, device="cpu")
    for _ in range(2):  # batches are numbered anew
        assert session.evaluate() == pytest.approx(logged)


class Returning(Data):
    def validation_step(self, batch):
        return {"loss": self.training_step(batch, 0), "scores": torch.zeros(7)}


def test_where_nothing_is_logged_the_returned_loss_counts():
    session = prepare(Task(build_model=Returning), {"batch_size": 4}, device="cpu")
    x, y = Lit().collate(samples(10, seed=1))
    expected = functional.cross_entropy(session.model.net[0](x), y)
    assert session.evaluate() == {"loss": pytest.approx(float(expected.detach()), rel=1e-6)}


class Silent(Returning):
    def validation_step(self, batch):
        return None


def test_a_validation_that_says_nothing_is_refused():
    session = prepare(Task(build_model=Silent), {"batch_size": 4}, device="cpu")
    with pytest.raises(TaskError, match=r"validation_step of Silent neither logged .* self.log"):
        session.evaluate()


class Manual(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_a_module_with_steps_of_its_own_is_validated_too():
    session = prepare(Task(build_model=Manual), {"batch_size": 4}, device="cpu")
    assert session.evaluate()["samples_seen"] == 10


def test_what_is_written_beside_the_module_comes_first():
    task = Task(build_model=Lit, eval_step=lambda model, batch: len(batch[0]), eval_dataset=lambda: samples(3, seed=2))
    assert prepare(task, {"batch_size": 3}, device="cpu").evaluate() == {"loss": 3}
    own = Task(build_model=Lit, training_step=lambda model, batch: model.training_step(batch, 0) * 0 + 2)
    assert prepare(own, {"batch_size": 4}, device="cpu").evaluate() == {"loss": 2}


class WithTwo(Lit):
    def val_dataloader(self):
        return [super().val_dataloader(), super().val_dataloader()]


class WithOneInAList(Lit):
    def val_dataloader(self):
        return [super().val_dataloader()]


@pytest.mark.parametrize(("cls", "number"), [(Lit, 10), (WithOneInAList, 10), (WithTwo, 12), (Plain, 12)])
def test_it_is_evaluated_on_its_own_loader_if_there_is_one(cls, number):
    task = Task(build_model=cls)
    assert gather_facts(task).eval_samples == number
    assert len(task.on_evaluation_data().dataset()) == number
    session = prepare(task, {"batch_size": 4}, device="cpu")
    if number == 12:
        with pytest.raises(TaskError, match="nothing to evaluate on"):
            session.evaluate()
    assert not math.isnan(next(iter(session.evaluate(samples(8, seed=3), batch_size=4).values())))


def test_a_loader_to_validate_on_that_cannot_be_made_keeps_nobody_from_training():
    class Absent(Lit):
        def val_dataloader(self):
            raise FileNotFoundError("val.csv")

    facts = gather_facts(Task(build_model=Absent))
    assert any("not validated" in warning and "val.csv" in warning for warning in facts.warnings)
