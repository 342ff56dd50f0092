"""Schedulers, moving averages, clipping and hooks of the user's: each works in a session, or is refused with the way out."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autotune import prepare
from autotune.errors import TaskError
from autotune.task import Task
from autotune.task.facts import check_task, gather_facts
from autotune.techniques import UnsupportedError

torch.set_num_threads(1)
CPU = torch.device("cpu")
CONFIGS = (
    {"batch_size": 4},
    {"batch_size": 2, "accumulation_steps": 2},
    {"batch_size": 4, "checkpoint_segments": 2},
    {"batch_size": 4, "optimizer_impl": "fused"},
    {"batch_size": 4, "amp": "fp16"},
)
every_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


def chain():
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)))


def pairs(batch_size):
    return torch.randn(batch_size, 6), 100 * torch.randn(batch_size, 6)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def session_of(config, **changes):
    task = Task(**{"build_model": chain, "make_batch": pairs, "configure_optimizers": adam, **changes})
    check_task(task, CPU)
    return prepare(task, config, device="cpu")


def steps_until_taken(session, number=3):
    """Steps, of which a GradScaler may skip the first."""
    for _ in range(number + (20 if session.scaler else 0)):
        session.step(session.task.batch(4))


@every_config
def test_a_moving_average_kept_by_a_hook_of_the_optimizer_follows_and_is_a_model_of_its_own(config):
    averages = []

    def configure(model):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = adam(model)
        optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
        averages.append(average)
        return optimizer

    session = session_of(config, configure_optimizers=configure)
    steps_until_taken(session)
    assert averages[-1].n_averaged >= 3
    x = torch.randn(2, 6)
    before = averages[-1].module(x).detach()
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.zero_()
    assert torch.equal(averages[-1].module(x), before)


@every_config
def test_clipping_in_a_hook_of_the_optimizer_sees_whole_unscaled_gradients(config):
    norms = []

    def configure(model):
        optimizer = adam(model)

        def clip(*_):
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            assert float(nn.utils.get_total_norm([p.grad for p in model.parameters()])) <= 0.0101

        optimizer.register_step_pre_hook(clip)
        return optimizer

    session = session_of(config, configure_optimizers=configure)
    torch.manual_seed(0)
    session.model.load_state_dict(chain().state_dict())
    batch = pairs(4)
    expected = nn.functional.mse_loss(session.model(batch[0]), batch[1])
    whole = nn.utils.get_total_norm(torch.autograd.grad(expected, list(session.model.parameters())))
    norms.clear()
    for _ in range(20 if session.scaler else 1):
        session.step(batch)
        if norms:
            break
    assert norms[0] == pytest.approx(float(whole), rel=0.05 if session.scaler else 1e-3)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_of_the_optimizer_keeps_it_out_of_the_backward_pass(register):
    def configure(model):
        optimizer = adam(model)
        getattr(optimizer, register)(lambda *_: None)
        return optimizer

    with pytest.raises(UnsupportedError, match="hooks of the optimizer's steps"):
        session_of({"batch_size": 4, "optimizer_in_backward": True}, configure_optimizers=configure)


@every_config
def test_hooks_of_modules_and_parameters_run(config):
    forward, backward, gradient = [], [], []

    def build_model():
        model = chain()
        model[1].register_forward_hook(lambda *_: forward.append(1))
        model[1].register_full_backward_hook(lambda *_: backward.append(1))
        model[1][0].weight.register_hook(lambda grad: gradient.append(1))
        return model

    session = session_of(config, build_model=build_model)
    for calls in (forward, backward, gradient):
        calls.clear()
    session.step(session.task.batch(4))
    micro = config.get("accumulation_steps", 1)
    assert len(backward) == len(gradient) == micro <= len(forward)


@pytest.mark.parametrize(
    "returned",
    [
        lambda optimizer, schedule: ([optimizer], [schedule]),
        lambda optimizer, schedule: ([optimizer], [{"scheduler": schedule, "interval": "step"}]),
        lambda optimizer, schedule: {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "loss"},
        },
        lambda optimizer, schedule: (optimizer, schedule),
    ],
)
def test_a_schedule_is_not_stepped_which_is_said(returned):
    def configure(model):
        optimizer = adam(model)
        return returned(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))

    session = session_of({"batch_size": 4}, configure_optimizers=configure)
    session.step(session.task.batch(4))
    assert session.optimizer.param_groups[0]["lr"] == 0.1
    assert "learning-rate scheduler" in "".join(gather_facts(session.task).warnings)


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = chain()
        self.called = []

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return adam(self)


class Clipped(Lit):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")

    def on_before_optimizer_step(self, optimizer):
        self.called.append("before the step")

    def on_before_zero_grad(self, optimizer):
        norm = float(nn.utils.get_total_norm([p.grad for p in self.parameters()]))
        self.called.append(("after the step", norm <= 0.0101))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.called.append("batch")
        return batch


@every_config
def test_the_hooks_of_a_lightning_module_around_an_optimizer_step_run_in_it(config):
    session = session_of(config, build_model=Clipped, configure_optimizers=None)
    steps_until_taken(session, 1)
    micro = config.get("accumulation_steps", 1)
    assert session.model.called[:micro] == ["batch"] * micro
    assert session.model.called[-2:] == ["before the step", ("after the step", True)]


@pytest.mark.parametrize("hook", ["on_after_backward", "on_train_batch_end", "transfer_batch_to_device"])
def test_a_hook_that_is_not_called_is_named(hook):
    cls = type("Hooked", (Lit,), {hook: lambda self, *args: None})
    (warning,) = gather_facts(Task(build_model=cls, make_batch=pairs)).warnings
    assert hook in warning and "Hooked" in warning


@pytest.mark.parametrize("hook", ["optimizer_step", "backward"])
def test_a_hook_that_replaces_a_part_of_the_step_is_refused_with_the_way_out(hook):
    cls = type("Own", (Lit,), {hook: lambda self, *args, **options: None})
    with pytest.raises(TaskError, match=rf"Own has a {hook} of its own.*train_step\(model, optimizers, batch\)"):
        check_task(Task(build_model=cls, make_batch=pairs), CPU)
