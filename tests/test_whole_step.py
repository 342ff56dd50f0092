"""A task's own `train_step`: run as it is, by everything that trains, and nothing reaches into it."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from autotune import api, prepare
from autotune.devices import open_device
from autotune.errors import TaskError
from autotune.prediction.job import trace_plan
from autotune.prediction.traces import plan_traces
from autotune.probe.finite import NonFiniteError
from autotune.probe.inspection import inspect_task
from autotune.probe.measure import Run
from autotune.records.config import ProbeSettings
from autotune.runners.jobs import CheckJob, NotCompared
from autotune.runners.local import LocalRunner
from autotune.task import Task, load_task
from autotune.task.facts import check_task, gather_facts
from autotune.task.source import TaskSource
from autotune.techniques import UnsupportedError, find_techniques
from tests.arithmetic import skip_without_arithmetic
from tests.models import gan

complete = find_techniques().complete

torch.set_num_threads(1)
GAN = Path(gan.__file__)


@pytest.fixture
def task():
    return load_task(GAN)


def run_of(task, **config):
    device = open_device("cpu")
    settings = ProbeSettings(memory_limit_bytes=None, max_timed_s=0.05, max_warmup_s=0.05)
    return Run(prepare(task, {"batch_size": 4, **config}, device=device), device, settings, lambda progress: None)


def test_a_step_is_the_users_own_to_the_bit(task):
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 4}, device="cpu")
    losses = [session.step(torch.ones(4, gan.FEATURES)) for _ in range(3)]
    torch.manual_seed(0)
    model = gan.build_model().train()
    optimizers = gan.configure_optimizers(model)
    for loss in losses:
        found = gan.train_step(model, optimizers, torch.ones(4, gan.FEATURES))
        torch.testing.assert_close(loss, (found["critic"] + found["generator"]).detach(), rtol=0, atol=0)
    for mine, users in zip(session.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, users)
    assert session.optimizer["schedule"].last_epoch == 3 and session.model.average.n_averaged == 3


def test_what_the_loader_yields_can_be_stepped_on(task):
    session = prepare(task, {"batch_size": 4}, device="cpu")
    assert session.step(next(iter(session.loader))).isfinite()


def test_a_probe_measures_it_and_calls_the_phase_by_its_name(task):
    run = run_of(task)
    measured = run.measure(0.0)
    assert measured.samples_per_s > 0 and set(measured.phases_s) == {"data", "train_step"}
    assert run.num_steps == int(run.session.model.average.n_averaged)


def test_a_loss_that_is_not_finite_ends_the_probe(task):
    broken = dataclasses.replace(task, train_step=lambda model, optimizers, batch: [float("nan"), 1.0], origin=None)
    with pytest.raises(NonFiniteError):
        run_of(broken).measure(0.0)


def test_only_what_does_not_reach_into_it_is_offered(task):
    found = inspect_task(task, device="cpu", memory_limit_bytes=None)
    support = found["support"]
    assert support["checkpoint_segments"]["choices"] == (0,) and "own" in support["checkpoint_segments"]["reason"]
    assert support["optimizer_impl"]["choices"] == ("default",)
    assert "fp16" not in (*support["amp"]["choices"], *support["amp"]["optional"])
    assert "gradient scaling" in support["amp"]["reason"]
    assert "own" not in support["compile"]["reason"]
    assert found["batch"]["accumulation_steps"] == (1,) and len(found["batch"]["sizes"]) > 1
    assert any("train_step is one unit" in warning for warning in found["facts"]["warnings"])


def test_the_layout_of_images_is_offered_and_tried():
    def train_step(model, optimizer, batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()

    task = Task(
        build_model=lambda: nn.Conv2d(3, 4, 3), make_batch=lambda n: torch.randn(n, 3, 8, 8), train_step=train_step
    )
    assert inspect_task(task, device="cpu", memory_limit_bytes=None)["support"]["channels_last"]["choices"] == (
        False,
        True,
    )


def test_with_a_global_batch_it_takes_all_of_it_at_once(task):
    found = inspect_task(dataclasses.replace(task, global_batch=48), device="cpu", memory_limit_bytes=None)
    assert found["batch"]["sizes"] == (48,) and "whole global batch" in found["batch"]["sizes_reason"]
    assert (found["baseline"]["batch_size"], found["baseline"]["accumulation_steps"]) == (48, 1)


@pytest.mark.parametrize(
    "config", [{"accumulation_steps": 2}, {"checkpoint_segments": 1}, {"optimizer_impl": "foreach"}, {"amp": "fp16"}]
)
def test_what_reaches_into_it_cannot_be_prepared(task, config):
    with pytest.raises(UnsupportedError, match="own"):
        prepare(task, {"batch_size": 4, **config}, device="cpu")


def test_autocast_lies_around_it():
    skip_without_arithmetic("bf16")
    seen = []

    def train_step(model, optimizer, batch):
        seen.append(model(batch).dtype)

    task = Task(build_model=lambda: nn.Linear(4, 4), make_batch=lambda n: torch.zeros(n, 4), train_step=train_step)
    assert prepare(task, {"amp": "bf16"}, device="cpu").step(torch.zeros(2, 4)) == 0
    assert seen == [torch.bfloat16]


def test_tracing_says_why_it_does_not(task):
    messages = list(trace_plan(task, plan_traces([complete({"batch_size": 4})], find_techniques()), "cpu"))
    failures = [found for message in messages for found in message.get("traces", {}).get("failures", {}).values()]
    assert set(failures) == {"the task's own step is one unit"}


def test_a_step_that_trains_nothing_is_refused(task):
    idle = dataclasses.replace(task, train_step=lambda model, optimizers, batch: None, origin=None)
    with pytest.raises(TaskError, match=r"left every parameter of Gan as it was.*training_step"):
        check_task(idle, torch.device("cpu"))


def overflowing(model, optimizer, batch):
    """As the first step of a GradScaler whose scale is too large: the update is left out."""
    loss = model(batch).sum() * torch.inf
    loss.backward()
    optimizer.zero_grad()


def updating_data(model, optimizer, batch):
    model(batch).sum().backward()
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad
    model.zero_grad()


def setting_gradients(model, optimizer, batch):
    """No gradient is accumulated, and no update leaves a version."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(model(batch).sum(), parameters), strict=True):
        parameter.grad = gradient
        parameter.data -= 0.1 * gradient


@pytest.mark.parametrize("step", [overflowing, updating_data, setting_gradients])
def test_a_step_of_which_gradients_are_all_that_shows_is_taken(step):
    check_task(
        Task(build_model=lambda: nn.Linear(4, 4), make_batch=lambda n: torch.ones(n, 4), train_step=step),
        torch.device("cpu"),
    )


@pytest.mark.parametrize(
    "unused", [{"training_step": lambda model, batch: None}, {"loss_weight": len}, {"max_grad_norm": 1.0}]
)
def test_what_it_would_leave_unused_is_refused(task, unused):
    with pytest.raises(TaskError, match=f"train_step.*so {next(iter(unused))} would not be used"):
        dataclasses.replace(task, **unused)


def test_two_optimizers_without_it_are_refused_with_the_way_out(task):
    with pytest.raises(TaskError, match=r"2 optimizers \(Adam and Adam\).*train_step\(model, optimizers, batch\)"):
        gather_facts(dataclasses.replace(task, train_step=None))


@pytest.mark.usefixtures("short_play_off")
def test_a_search_answers_and_says_what_it_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = api.search(GAN, device="cpu", budget="1m", trials=1, storage=f"sqlite:///{tmp_path}/gan.db")
    assert result.samples_per_s > 0 and result.config["accumulation_steps"] == 1
    assert any("train_step is one unit" in warning for warning in result.warnings)


def test_its_inspection_says_that_its_gradients_cannot_be_compared(task):
    assert not inspect_task(task, device="cpu", memory_limit_bytes=None)["comparable"]


def test_its_gradients_are_not_compared_and_the_reason_is_told(tmp_path):
    with LocalRunner(TaskSource.of(GAN), device="cpu", logs=tmp_path) as runner:
        found = runner.run(
            CheckJob(config=complete({"batch_size": 4}), settings=ProbeSettings(memory_limit_bytes=None), batch_size=4)
        )
    assert isinstance(found, NotCompared) and "own step is one unit" in found.reason
