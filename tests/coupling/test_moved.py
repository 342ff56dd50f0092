"""What a training pass changes beside what is trained is named, however it is changed and wherever it is held."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune.coupling.moved import moved_by_passes
from autotune.randomness import RandomState
from autotune.task import Task
from tests.coupling.losses import cross_entropy, encoder, labelled
from tests.coupling.test_searches import searched, task_with

DECAY = 0.99


class WithTeacher(nn.Module):
    """A student, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = encoder()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


def in_place(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 1 - DECAY)


def by_data(teacher: nn.Module, student: nn.Module) -> None:
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.data.mul_(DECAY).add_(fast.data, alpha=1 - DECAY)


def by_other_data(teacher: nn.Module, student: nn.Module) -> None:
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.data = slow.data * DECAY + fast.data * (1 - DECAY)


def of_teacher(follow: Callable[[nn.Module, nn.Module], None]) -> Callable[[Any, Any], torch.Tensor]:
    def step(model: Any, batch: Any) -> torch.Tensor:
        follow(model.teacher, model.student)
        return cross_entropy(model.student, batch)

    return step


def moved(step: Any, build_model: Callable[[], nn.Module] = encoder) -> str:
    task = Task(build_model=build_model, make_batch=labelled, training_step=step)
    return moved_by_passes(task, task.model(), task.batch(2))


@pytest.mark.parametrize("follow", [in_place, by_data, by_other_data])
def test_a_teacher_in_the_model_is_named_however_it_follows(follow: Callable[[nn.Module, nn.Module], None]) -> None:
    torch.manual_seed(0)
    assert moved(of_teacher(follow), WithTeacher).startswith("teacher.0.")


def test_a_teacher_that_the_training_step_holds_is_named_by_its_class() -> None:
    teacher = encoder().requires_grad_(False)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        in_place(teacher, model)
        return cross_entropy(model, batch)

    assert moved(step) == "a Sequential outside the model"


class Queue(nn.Module):
    """Keeps the latest samples, and counts its passes."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.net, self.keeps, self.passes = encoder(), keeps, 0
        self.register_buffer("queue", torch.zeros(8, 3))
        self.register_buffer("positions", torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        if self.keeps:
            self.queue = torch.cat([out.detach()[:, :3], self.queue])[:8]
        else:
            self.passes += 1
        self.positions = torch.arange(4)  # anew in each pass, and the same
        return out


def test_a_queue_and_a_count_are_named() -> None:
    assert moved(cross_entropy, lambda: Queue(keeps=True)) == "queue"
    assert moved(cross_entropy, lambda: Queue(keeps=False)) == "passes"


QUEUE = torch.zeros(6, 5)


def test_a_queue_outside_the_model_that_is_replaced_is_named() -> None:
    held = torch.zeros(8, 5)

    def into_global(model: nn.Module, batch: Any) -> torch.Tensor:
        global QUEUE
        QUEUE = torch.cat([model(batch[0]).detach(), QUEUE])[:6]
        return cross_entropy(model, batch)

    def into_closure(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal held
        held = torch.cat([model(batch[0]).detach(), held])[:8]
        return cross_entropy(model, batch)

    assert moved(into_global) == "a tensor of shape (6, 5) outside the model"
    assert moved(into_closure) == "a tensor of shape (8, 5) outside the model"


@pytest.mark.parametrize("rows", [4, 2**20])
def test_a_large_tensor_of_which_a_part_is_changed_is_named(rows: int) -> None:
    held = torch.zeros(rows, 2)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        held[1] += 1
        return cross_entropy(model, batch)

    assert moved(step) == f"a tensor of shape ({rows}, 2) outside the model"


class WithScratch(nn.Module):
    """Writes the same values into a buffer in each pass, some of which are no numbers, and keeps a part of what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.kept = encoder(), torch.zeros(())
        self.register_buffer("mask", torch.full((4, 4), torch.nan))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask.fill_(-torch.inf).triu_(1)
        self.mask[0, 0] = torch.nan
        out: torch.Tensor = self.net(x)
        self.kept = out.detach().mean()
        return out


def test_what_is_rewritten_with_the_same_values_is_not_named() -> None:
    assert moved(cross_entropy, WithScratch) == ""


class OwnNorm(nn.BatchNorm1d):
    """As other packages have them."""


def test_statistics_of_a_class_derived_from_batch_normalisation_are_not_named() -> None:
    assert moved(cross_entropy, lambda: nn.Sequential(OwnNorm(8), encoder())) == ""


class Plain(nn.Module):
    """Draws noise, and keeps its latest activations, a constant that the first pass makes, and statistics of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Dropout(), encoder())
        self.latest = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(()))
        self.latest = out = self.net[-1](self.net[:-1](nn.functional.pad(x, (0, 8 - x.shape[1])))[:, : x.shape[1]])
        return out


def test_statistics_noise_and_what_is_made_once_are_not_named() -> None:
    before = RandomState(torch.device("cpu"))
    assert moved(cross_entropy, Plain) == ""
    assert moved(cross_entropy) == ""
    before.restore()


def test_random_states_stay_as_they_are() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model, (functional.dropout(batch[0]), batch[1]))

    task = Task(build_model=encoder, make_batch=labelled, training_step=step)
    model, batch = task.model(), task.batch(2)
    before = RandomState(torch.device("cpu"))
    assert moved_by_passes(task, model, batch) == "" and not before.has_moved()


def test_an_answer_that_accumulates_otherwise_says_what_its_micro_batches_change(tmp_path: Any) -> None:
    task = task_with(of_teacher(in_place), labelled, build_model=WithTeacher)
    result, _ = searched(task, tmp_path)
    assert result.config["accumulation_steps"] > 1
    (said,) = [warning for warning in result.warnings if "teacher" in warning]
    assert said.startswith("accumulation_steps: each forward pass of your training code changes teacher.0.")
    assert "keep today's with --fix accumulation_steps=1" in said
    kept, _ = searched(task, tmp_path / "kept", fix={"accumulation_steps": 1})
    assert kept.config["accumulation_steps"] == 1 and not any("teacher" in warning for warning in kept.warnings)
