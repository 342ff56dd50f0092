from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.task import Task
from autotune.techniques import UnsupportedError, activation_offload, find_techniques
from autotune.techniques.inplace_activations import InplaceActivations
from tests.arithmetic import skip_without_arithmetic
from tests.prediction.real_memory import real_peak_bytes
from tests.prediction.test_fake_steps import traced

complete = find_techniques().complete

WIDTH = 8


class Model(nn.Module):
    """Two layers around an activation function. Subclasses say in their name what is done with its input."""

    safe: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relu, self.leaky = nn.ReLU(), nn.LeakyReLU(0.1)
        self.register_buffer("mean", torch.linspace(-1, 1, WIDTH).repeat(2, 1))
        self.constant = torch.linspace(-1, 1, WIDTH).repeat(2, 1)

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x), x))

    def middle(self, hidden: Any, x: Any) -> Any:
        raise NotImplementedError


class UsedOnce(Model):
    safe = ("leaky", "relu")

    def middle(self, hidden: Any, x: Any) -> Any:
        return self.relu(self.last(self.leaky(hidden)))


class AddedLater(Model):
    def middle(self, hidden: Any, x: Any) -> Any:
        return hidden + self.last(self.relu(hidden))


class AddedLaterAndNeverNegative(Model):
    """In place it makes no difference to these values, and none the less is not safe."""

    def middle(self, hidden: Any, x: Any) -> Any:
        hidden = hidden.square()
        return hidden + self.last(self.relu(hidden))


class PartUsedLater(Model):
    def middle(self, hidden: Any, x: Any) -> Any:
        gate, value = hidden.chunk(2, -1)
        return (self.relu(gate) * value).repeat(1, 2)


class ResultOfItsOwnBackward(Model):
    def middle(self, hidden: Any, x: Any) -> Any:
        return self.leaky(torch.tanh(hidden))


class TwoOfOneInput(Model):
    def middle(self, hidden: Any, x: Any) -> Any:
        return self.relu(hidden) - self.leaky(-hidden) + self.leaky(hidden)


class OneAfterAnother(Model):
    safe = ("leaky",)

    def middle(self, hidden: Any, x: Any) -> Any:
        return self.relu(self.leaky(hidden))


class ResultChanged(Model):
    """The result may be changed, as long as the backward pass does not need it."""

    safe = ("relu",)

    def middle(self, hidden: Any, x: Any) -> Any:
        hidden = self.leaky(hidden)
        hidden += x
        return self.relu(self.last(hidden))


class OfTheBatch(Model):
    def middle(self, hidden: Any, x: Any) -> Any:
        return hidden + self.relu(x)


class OfABuffer(Model):
    def middle(self, hidden: Any, x: Any) -> Any:
        return hidden + self.relu(self.mean)


class OfAConstant(Model):
    def middle(self, hidden: Any, x: Any) -> Any:
        return hidden + self.leaky(self.constant)


class OfAParameter(Model):
    def middle(self, hidden: Any, x: Any) -> Any:
        return hidden + self.relu(self.last.weight[0]) * self.leaky(self.first.bias)


class AddedLaterNowAndThen(Model):
    """As where layers are dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = random.Random(0)

    def middle(self, hidden: Any, x: Any) -> Any:
        after = self.last(self.relu(hidden))
        return after + hidden if self.drawn.random() < 0.3 else after  # first in the fourth pass


class AddedLaterInEvaluation(Model):
    safe = ("relu",)

    def middle(self, hidden: Any, x: Any) -> Any:
        after = self.last(self.relu(hidden))
        return after if self.training else after + hidden


class SafeInOneOfTwoPlaces(Model):
    def middle(self, hidden: Any, x: Any) -> Any:
        hidden = self.relu(hidden)
        inner = self.last(hidden)
        return self.relu(inner) + inner


MODELS = Model.__subclasses__()


def task_of(build_model: Any) -> Task:
    return Task(build_model=build_model, make_batch=lambda n: (torch.randn(n, WIDTH), torch.randint(0, 4, (n,))))


def trained(task: Task, on: bool, **config: Any) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 2, "inplace_activations": on, **config}, device="cpu")
    torch.manual_seed(1)
    batch = task.batch(2)
    losses = [session.step(batch) for _ in range(3)]
    return session, [*losses, *session.model.parameters(), *session.model.buffers(), batch[0]]


def in_place(model: nn.Module) -> tuple[str, ...]:
    return tuple(sorted(name for name, module in model.named_modules() if getattr(module, "inplace", False)))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_a_module_overwrites_its_input_only_where_nobody_needs_it(model: Any, make_setting: Any) -> None:
    setting = make_setting(task_of(model))
    support = InplaceActivations().support(setting)
    assert in_place(setting.model) == ()
    if model.safe:
        assert support.choices == (False, True)
        (session, found), (_, plain) = (trained(task_of(model), on) for on in (True, False))
        assert in_place(session.model) == model.safe
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-7)
    else:
        assert support.choices == (False,) and "needed" in support.reason
        with pytest.raises(UnsupportedError, match="needed"):
            prepare(task_of(model), {"inplace_activations": True}, device="cpu")


def test_the_wrong_module_in_place_would_not_be_noticed() -> None:
    task = task_of(AddedLater)
    losses = []
    for on in (False, True):
        torch.manual_seed(0)
        session = prepare(task, {"batch_size": 2}, device="cpu")
        session.model.relu.inplace = on
        losses.append(session.loss(task.batch(2)))
    assert losses[0] != losses[1]


def test_evaluation_and_a_copy_of_the_model_overwrite_nothing_in_between() -> None:
    found = []
    for on in (False, True):
        session, _ = trained(task_of(AddedLaterInEvaluation), on)
        torch.manual_seed(2)
        batch = session.task.batch(2)
        evaluated = [model.eval()(batch[0]) for model in (copy.deepcopy(session.model), session.model)]
        session.model.train()
        found.append([*evaluated, session.step(batch)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)
    assert in_place(session.model) == ("relu",)


class Branching(nn.Module):
    """What its layer saves is the input of `relu`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.relu, self.leaky = linear(), linear(), nn.ReLU(), nn.LeakyReLU(0.1)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        return self.leaky(self.last(hidden) + self.relu(hidden))


def test_what_waits_in_host_memory_is_not_overwritten_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "_SMALLEST_BYTES", 0)
    for offloaded in (0, 3):
        session, _ = trained(task_of(lambda: blocks(Branching)), True, activation_offload=offloaded)
        assert in_place(session.model) == ("0.0.leaky", "1.0.leaky", "2.0.leaky")


def blocks(*layers: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(*(layer() for layer in layers)) for _ in range(3)))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def norm() -> nn.Module:
    return nn.BatchNorm1d(WIDTH)


def test_a_recomputed_block_reads_its_input_again() -> None:
    task = task_of(lambda: blocks(linear, nn.LeakyReLU, linear, nn.ELU))
    behind = task_of(lambda: nn.Sequential(linear(), blocks(nn.LeakyReLU, linear, norm, nn.ReLU)))
    for some, config in ((task, {"checkpoint_segments": 3}), (behind, {}), (behind, {"checkpoint_segments": 3})):
        (session, found), (_, plain) = (trained(some, on, **config) for on in (True, False))
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
        first_layers = {"1.0.0", "1.1.0", "1.2.0"} & set(in_place(session.model))
        assert first_layers == ({"1.0.0"} if some is behind and not config else set())


def test_finding_out_changes_nothing_else() -> None:
    task = task_of(lambda: blocks(linear, norm, nn.ReLU))
    states = []
    for on in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        session = prepare(task, {"inplace_activations": on}, device="cpu")
        numbers = torch.tensor([torch.rand(()), random.random(), numpy.random.rand()])
        assert all(parameter.grad is None for parameter in session.model.parameters())
        states.append([numbers, *session.model.state_dict().values()])
    assert in_place(session.model) == ("0.2", "1.2", "2.2")
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_model_that_takes_no_two_samples_is_tried_with_its_own_batch() -> None:
    task = task_of(lambda: nn.Sequential(nn.Unflatten(0, (-1, 4)), nn.Linear(WIDTH, 4), nn.ReLU(), nn.Flatten(0, 1)))
    session = prepare(task, {"batch_size": 8, "inplace_activations": True}, device="cpu")
    assert in_place(session.model) == ("2",)


def test_it_says_where_it_does_not_apply(make_setting: Any) -> None:
    support = InplaceActivations().support(make_setting(task_of(lambda: nn.Sequential(linear(), nn.SiLU()))))
    assert support.choices == (False,) and "LeakyReLU" in support.reason
    with pytest.raises(UnsupportedError, match="LeakyReLU"):
        prepare(task_of(linear), {"inplace_activations": True}, device="cpu")
    compiled = {"inplace_activations": True, "compile": "default"}
    assert InplaceActivations().is_redundant(complete(compiled))
    assert "compiler" in InplaceActivations().conflict(complete(compiled))


def level() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU())


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), *(level() for _ in range(8)), nn.Flatten(), nn.Linear(16 * 900, 4))


@pytest.mark.arithmetic
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_its_memory_is_predicted_and_less(amp: str) -> None:
    skip_without_arithmetic(amp)
    task = Task(build_model=convolutional, make_batch=lambda n: (torch.randn(n, 3, 32, 32), torch.randint(0, 4, (n,))))
    plain, switched = (complete({"batch_size": 8, "amp": amp, "inplace_activations": on}) for on in (False, True))
    traces = traced(task, [plain, switched])
    peaks = {config: traces.peak(config, find_techniques()) for config in (plain, switched)}
    predicted = {config: peak.peak_bytes for config, peak in peaks.items() if peak is not None}
    assert predicted[switched] < 0.9 * predicted[plain]
    for config in (plain, switched):
        assert predicted[config] == pytest.approx(real_peak_bytes(task, config), rel=0.03 if amp == "off" else 0.08)
