import copy
import dataclasses
import json
import os
import pickle
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from autotune import prepare
from autotune.errors import TaskError
from autotune.probe.inspection import inspect_task
from autotune.task import Task, load_task, trainer_stand_in
from autotune.task.batches import StepBatch
from autotune.task.facts import check_task, gather_facts
from autotune.task.trainer_stand_in import SilentLogger
from autotune.task.usercode import arose_in_autotune
from autotune.techniques import UnsupportedError

CPU = torch.device("cpu")


class Lit(pl.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.net = nn.Linear(width, 2)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss)
        self.log_dict({"loss": loss})
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class WithData(Lit):
    def setup(self, stage):
        self.data = [torch.full((4,), float(i)) for i in range(6)]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, batch_size=2, collate_fn=self.double)

    def double(self, samples):
        return 2 * torch.stack(samples)


def lit(cls=Lit):
    return Task(build_model=cls, make_batch=lambda n: torch.randn(n, 4))


def refused(call, *expected):
    with pytest.raises(TaskError) as caught:
        call()
    for text in expected:
        assert text in str(caught.value), str(caught.value)


def test_a_lightning_module_trains_without_a_trainer_and_without_a_warning():
    task = lit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = task.model()
        optimizer = task.optimizer(model)
        task.loss(model, task.batch(3)).backward()
    optimizer.step()
    assert type(optimizer) is torch.optim.SGD
    assert task.weight(task.batch(3), 3) == 3


class Frozen(Lit):
    """Its normalisation keeps its statistics, as a pretrained backbone's does."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4).eval()


def test_a_lightning_module_keeps_the_modes_of_its_parts_as_lightning_does():
    model = lit(Frozen).model()
    assert model.training and not model.norm.training
    assert not prepare(lit(Frozen), {}, device="cpu").model.norm.training
    assert all(module.training for module in lit(lambda: Frozen().eval()).model().modules())


def test_schedulers_of_a_lightning_module_are_ignored_with_a_warning():
    (warning,) = gather_facts(lit()).warnings
    assert "scheduler" in warning


def test_a_lightning_step_may_take_the_batch_alone_and_return_the_loss():
    class Short(Lit):
        def training_step(self, batch):
            return self.net(batch).mean()

    check_task(lit(Short), CPU)


def test_a_lightning_module_finds_a_stand_in_where_its_trainer_would_be():
    class Asking(Lit):
        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_scalar(
                "first", self.optimizers().param_groups[0]["lr"], self.trainer.global_step
            )
            assert self.lr_schedulers().last_epoch == 0 and not hasattr(self.trainer, "datamodule")
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]

    class Lost(Lit):
        def training_step(self, batch, batch_idx):
            return self.trainer.datamodule.scale * self.net(batch).mean()

    assert prepare(lit(Asking), {"batch_size": 4}, device="cpu").step(torch.randn(4, 4)).isfinite()
    refused(lambda: check_task(lit(Lost), CPU), "AttributeError", "no trainer.datamodule", "as an argument")


def test_the_steps_of_a_lightning_module_are_counted():
    """What a module does in some of its steps alone, it does not do in every step of a probe."""
    seen = []

    class Counting(Lit):
        def training_step(self, batch, batch_idx):
            seen.append((batch_idx, self.global_step))
            return self.net(batch).mean()

    session = prepare(lit(Counting), {"batch_size": 2}, device="cpu")
    for _ in range(3):
        session.step(torch.randn(2, 4))
    assert seen == [(0, 0), (1, 1), (2, 2)]
    seen.clear()
    session = prepare(lit(Counting), {"batch_size": 2, "accumulation_steps": 2}, device="cpu")
    for _ in range(2):
        session.step(torch.randn(4, 4))
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1)]  # batches, and optimizer steps of two of them


class Counting(Lit):
    """It writes down the samples, the number of the batch and that of the optimizer step, and has memory for four samples."""

    def __init__(self):
        super().__init__()
        self.net, self.seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), []

    def training_step(self, batch, batch_idx):
        self.seen.append((len(batch), batch_idx, self.global_step))
        if len(batch) > 4:
            torch.empty(2**50, dtype=torch.uint8)
        return self.net(batch).pow(2).mean()

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(("step", self.global_step))


def test_passes_that_are_tried_before_training_and_those_of_evaluation_are_no_batches_of_a_lightning_module():
    session = prepare(lit(Counting), {"batch_size": 2, "inplace_activations": True}, device="cpu")
    assert session.model.seen, "which modules may overwrite their input was tried"
    session.model.seen.clear()
    session.step(torch.randn(2, 4))
    session.evaluate([torch.randn(2, 4)] * 3)
    session.step(torch.randn(2, 4))
    assert session.model.seen[:2] == [(2, 0, 0), ("step", 0)]
    assert session.model.seen[-2:] == [(2, 1, 1), ("step", 1)]


def test_a_step_that_is_taken_again_in_halves_is_one_step_of_a_lightning_module():
    session = prepare(lit(Counting), {"batch_size": 8}, device="cpu")
    for _ in range(2):
        session.step(torch.randn(8, 4))
    seen = [seen for seen in session.model.seen if seen[0] in (4, "step")]
    assert seen == [(4, 0, 0), (4, 0, 0), ("step", 0), (4, 1, 1), (4, 1, 1), ("step", 1)], (
        "a half has its batch's number"
    )
    session.step(StepBatch([(torch.randn(8, 4), 8), (torch.randn(2, 4), 2)]))
    assert session.model.seen[-4:] == [(4, 2, 2), (4, 2, 2), (2, 3, 2), ("step", 2)]


def test_a_module_that_trains_can_be_copied_and_pickled_without_its_optimizer():
    session = prepare(Task(build_model=Lit, make_batch=lambda n: torch.randn(n, 4)), {"batch_size": 2}, device="cpu")
    assert session.model.optimizers() is not None
    assert copy.deepcopy(session.model).optimizers() is None
    assert pickle.loads(pickle.dumps(session.model)).optimizers() is None


def test_a_loggers_experiment_is_an_empty_container():
    logger = SilentLogger()
    logger.experiment["loss"] = 1.0
    assert "loss" not in logger.experiment.config and list(logger.experiment) == []
    assert os.path.join(logger.log_dir, "samples")


@pytest.mark.parametrize("installed", [True, False])
def test_what_trackers_cannot_take_fails_where_nothing_is_tracked(installed, tmp_path, monkeypatch):
    """NumPy has no bf16: torch's own writer for TensorBoard converts it, tensorboardX, which Lightning takes else, does not."""
    if installed:
        (tmp_path / "tensorboard").mkdir()
        (tmp_path / "tensorboard" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setattr(trainer_stand_in, "find_spec", lambda name: None)

    class Drawing(Lit):
        def training_step(self, batch, batch_idx):
            out = self.net(batch)
            self.logger.experiment.add_histogram("out", out, 0)
            return out.float().mean()

    assert prepare(lit(Drawing), {"batch_size": 2}, device="cpu").step(torch.randn(2, 4)).isfinite()
    session = prepare(lit(Drawing), {"batch_size": 2, "amp": "bf16"}, device="cpu")
    if installed:
        assert session.step(torch.randn(2, 4)).isfinite()
        with pytest.raises(TypeError, match="Float8"):
            SilentLogger().add_histogram("weights", torch.zeros(2).to(torch.float8_e4m3fn))
        return
    with pytest.raises(TypeError, match="BFloat16") as caught:
        session.step(torch.randn(2, 4))
    assert not arose_in_autotune(caught.value)


def test_layers_made_in_configure_model_are_there():
    class Late(Lit):
        def configure_model(self):
            self.late = nn.Linear(2, 2)

    assert any(name.startswith("late") for name, _ in lit(Late).model().named_parameters())


def test_the_loader_of_a_lightning_module_gives_the_dataset_and_collate_fn():
    task = Task(build_model=WithData)
    assert len(task.dataset()) == 6
    assert task.collate_fn([torch.ones(4)]).tolist() == [[2.0] * 4]
    check_task(task, CPU)
    assert json.dumps(dataclasses.asdict(gather_facts(task)))


@pytest.mark.parametrize(("global_batch", "batch_size"), [(None, 2), (6, 2), (9, 1)])
def test_the_batch_of_a_lightning_modules_loader_is_that_of_the_baseline(global_batch, batch_size):
    task = Task(build_model=WithData, global_batch=global_batch)
    found = inspect_task(task, device="cpu", memory_limit_bytes=None)["baseline"]
    assert found["batch_size"] == batch_size
    assert found["batch_size"] * found["accumulation_steps"] == (global_batch or 2)


def test_a_lightning_module_that_build_model_returns_is_found_too():
    task = Task(build_model=lambda: WithData(width=4))
    check_task(task, CPU)
    assert len(task.dataset()) == 6


def test_a_lightning_module_without_data_is_refused():
    refused(lambda: Task(build_model=Lit), "neither make_batch", "train_dataloader() in Lit", "write one")
    refused(Task(build_model=lambda: Lit()).dataset, "neither make_batch", "write one")


def test_a_lightning_loader_that_is_no_loader_is_refused():
    class Two(WithData):
        def train_dataloader(self):
            return [super().train_dataloader()] * 2

    refused(Task(build_model=Two).dataset, "a list of 2", "one torch.utils.data.DataLoader", "train_dataset()")


class Manual(Lit):
    """Two networks and a schedule, as Lightning's own examples have them."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        assert not self.other.weight.requires_grad
        loss = self.other(self.net(batch)).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        other = self.other(self.net(batch).detach()).mean()
        second.zero_grad()
        self.manual_backward(other)
        second.step()
        self.lr_schedulers().step()
        self.log_dict({"loss": loss, "other": other})

    def configure_optimizers(self):
        first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.other))
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1)]


def test_manual_optimization_is_a_whole_step_of_the_modules_own():
    task = lit(Manual)
    check_task(task, CPU)
    found = inspect_task(task, device="cpu", memory_limit_bytes=None)
    assert "manual optimization of Manual is one unit" in "".join(found["facts"]["warnings"])
    assert found["support"]["optimizer_impl"]["choices"] == ("default",)
    session = prepare(task, {"batch_size": 4}, device="cpu")
    before = [p.detach().clone() for p in session.model.parameters()]
    session.step(torch.randn(4, 4))
    assert not any(torch.equal(p, old) for p, old in zip(session.model.parameters(), before, strict=True))
    assert session.model.lr_schedulers().last_epoch == 1
    with pytest.raises(UnsupportedError, match="own step takes all"):
        prepare(task, {"batch_size": 4, "accumulation_steps": 2}, device="cpu")


def test_a_training_step_beside_it_is_taken_instead_of_manual_optimization():
    def training_step(model, batch):
        return model.net(batch).mean()

    task = Task(
        build_model=Manual,
        make_batch=lambda n: torch.randn(n, 4),
        training_step=training_step,
        configure_optimizers=lambda model: torch.optim.SGD(model.net.parameters(), lr=0.1),
    )
    check_task(task, CPU)
    assert prepare(task, {"batch_size": 2, "accumulation_steps": 2}, device="cpu").step(torch.randn(4, 4)).isfinite()


def test_a_lightning_step_that_returns_a_dict_without_loss_is_refused():
    class Lossless(Lit):
        def training_step(self, batch, batch_idx):
            return {"los": self.net(batch).mean()}

    refused(lambda: check_task(lit(Lossless), CPU), "Lossless", "los:", "'loss'")


LIGHTNING_FILE = """
import torch
from lightning import LightningModule

class Base(LightningModule):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).mean()

class Net(Base):
    def __init__(self, width{default}):
        super().__init__()
        self.net = torch.nn.Linear(4, width)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 4)))
"""


def test_the_one_lightning_class_of_a_file_is_the_task(write):
    task = load_task(write(LIGHTNING_FILE.format(default="=3"), whole=True))
    assert type(task.model()).__name__ == "Net"
    assert type(task.optimizer(task.model())) is torch.optim.AdamW
    check_task(task, CPU)


def test_of_several_lightning_classes_one_can_be_named(write):
    path = write(LIGHTNING_FILE.format(default="=3") + "\nclass Other(Base): ...", whole=True)
    refused(lambda: load_task(path), "2 LightningModules (Net and Other)", "model.py:Net")
    assert type(load_task(f"{path}:Net").model()).__name__ == "Net"


def test_a_lightning_class_that_needs_arguments_is_refused(write):
    path = write(LIGHTNING_FILE.format(default=""), whole=True)
    refused(lambda: load_task(path), "Net", "'width'", "def build_model(): return Net(...)")


def bert():
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16))


def test_a_hugging_face_classifier_is_taken_as_it_is():
    def make_batch(batch_size):
        return {"input_ids": torch.randint(20, (batch_size, 6)), "labels": torch.randint(3, (batch_size,))}

    task = Task(build_model=bert, make_batch=make_batch)
    check_task(task, CPU)
    assert task.weight(make_batch(5), 5) == 5


def tokens(batch_size):
    ids = torch.randint(20, (batch_size, 6))
    labels = ids.clone()
    labels[0, 3:] = -100
    return {"input_ids": ids, "labels": labels}


def test_a_hugging_face_language_model_counts_the_labels_it_predicts():
    task = Task(build_model=gpt2, make_batch=tokens)
    check_task(task, CPU)
    assert task.weight(tokens(2), 2) == 2 + 5


def test_micro_batches_of_a_language_model_weigh_up_to_the_loss_of_the_whole():
    torch.manual_seed(0)
    task = Task(build_model=gpt2, make_batch=tokens)
    model, whole = task.model().eval(), tokens(2)
    halves = [{key: value[i : i + 1] for key, value in whole.items()} for i in range(2)]
    total = sum(task.loss(model, half) * task.weight(half, 1) for half in halves)
    torch.testing.assert_close(total / task.weight(whole, 2), task.loss(model, whole))


def test_a_hugging_face_model_keeps_no_cache_while_it_trains():
    assert gpt2().config.use_cache
    model = Task(build_model=gpt2, make_batch=tokens).model()
    assert not model.config.use_cache
    assert model(**tokens(2)).past_key_values is None


def test_a_hugging_face_batch_without_labels_is_refused():
    task = Task(build_model=gpt2, make_batch=lambda n: {"input_ids": torch.randint(20, (n, 6))})
    refused(lambda: check_task(task, CPU), "input_ids", "are the labels in the batch?", "def training_step")


def test_asking_whether_a_task_takes_whole_steps_draws_no_random_numbers():
    task = Task(build_model=lambda: nn.Linear(3, 3), make_batch=lambda n: torch.randn(n, 3))
    torch.manual_seed(0)
    expected = task.model().weight
    torch.manual_seed(0)
    fresh = dataclasses.replace(task)
    assert not fresh.takes_whole_steps
    assert torch.equal(fresh.model().weight, expected)
