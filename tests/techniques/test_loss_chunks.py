from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autotune import prepare
from autotune.task import Task
from autotune.techniques import UnsupportedError, find_techniques
from autotune.techniques.loss_chunks import LossChunks
from autotune.techniques.tensors import scores

from .gpus import GPU

techniques = find_techniques()

CLASSES = 4099

Loss = Callable[[Any, Any], Any]
# ways to the loss that people write: (batch, length, classes), (batch, length) -> loss
LOSSES: dict[str, Loss] = {
    "view": lambda s, y: functional.cross_entropy(s.view(-1, s.size(-1)), y.view(-1)),
    "transpose": lambda s, y: functional.cross_entropy(s.transpose(1, 2), y),
    "shifted": lambda s, y: functional.cross_entropy(
        s[..., :-1, :].contiguous().view(-1, CLASSES), y[:, 1:].reshape(-1)
    ),
    "module": lambda s, y: nn.CrossEntropyLoss(label_smoothing=0.1)(s.flatten(0, 1).float(), y.flatten()),
    "ignored": lambda s, y: functional.cross_entropy(s.flatten(0, 1), y.flatten() % 7 - 1, ignore_index=-1),
    "weighted": lambda s, y: functional.cross_entropy(
        s.reshape(-1, CLASSES), y.reshape(-1), weight=torch.linspace(0.5, 2, CLASSES)
    ),
    "sum": lambda s, y: functional.cross_entropy(s.flatten(0, 1), y.flatten(), reduction="sum") / y.numel(),
    "last": lambda s, y: functional.cross_entropy(s[:, -1], y[:, -1]),
}
# what needs the scores themselves
COMPUTED: dict[str, Loss] = {
    "softmax": lambda s, y: -s.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "scaled": lambda s, y: functional.cross_entropy((s * 0.5).flatten(0, 1), y.flatten()),
    "each": lambda s, y: functional.cross_entropy(s.transpose(1, 2), y, reduction="none").mean(),
    "capped": lambda s, y: functional.cross_entropy(torch.tanh(s / 30).mul(30).flatten(0, 1), y.flatten()),
}


class Language(nn.Module):
    def __init__(self, bias: bool, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Any) -> Any:
        return self.head(torch.tanh(self.mix(self.tokens(ids))))


def task_of(loss: Loss, *, bias: bool = True, tied: bool = False) -> Task:
    return Task(
        build_model=lambda: Language(bias, tied),
        make_batch=lambda n: (torch.randint(CLASSES, (n, 6)), torch.randint(CLASSES, (n, 6))),
        training_step=lambda model, batch: loss(model(batch[0]), batch[1]),
    )


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of five rows."""
    monkeypatch.setattr(scores, "CHUNK_BYTES", (5 * 4 * CLASSES,) * 2)


def trained(task: Task, on: bool, **config: Any) -> tuple[Any, list[Any]]:
    session, loss = stepped(task, on, **config)
    return loss, [parameter.grad for parameter in session.model.parameters()]


def stepped(task: Task, on: bool, **config: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 4, "loss_chunks": on, **config}, device="cpu")
    torch.manual_seed(1)
    return session, session.accumulate(task.batch(4))


def losses_in_pieces(task: Task) -> int:
    return int(stepped(task, True)[0].model.head.forward.use.losses)


def assert_close(found: tuple[Any, list[Any]], expected: tuple[Any, list[Any]]) -> None:
    torch.testing.assert_close(found[0], expected[0])
    for gradient, plain in zip(found[1], expected[1], strict=True):
        assert (gradient - plain).norm() <= 1e-5 * plain.norm()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("bias", "tied"), [(True, False), (False, True)])
def test_loss_and_gradients_are_those_of_plain_training(name: str, bias: bool, tied: bool) -> None:
    task = task_of(LOSSES[name], bias=bias, tied=tied)
    assert_close(trained(task, True), trained(task, False))
    assert losses_in_pieces(task) == 1


@pytest.mark.parametrize("weight", [None, torch.linspace(0.5, 2, CLASSES)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_whose_labels_are_all_ignored_moves_no_weight(weight: Any, smoothing: float) -> None:
    def loss(scores: Any, labels: Any) -> Any:
        ignored = torch.full_like(labels, -100).flatten()
        return functional.cross_entropy(scores.flatten(0, 1), ignored, weight=weight, label_smoothing=smoothing)

    found, gradients = trained(task_of(loss), True)
    assert torch.as_tensor(found).isnan()
    assert not any(gradient.count_nonzero() for gradient in gradients)
    torch.testing.assert_close(gradients, trained(task_of(loss), False)[1])


def test_labels_whose_classes_weigh_nothing_make_the_gradient_not_a_number_as_in_plain_training() -> None:
    def loss(scores: Any, labels: Any) -> Any:
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), weight=torch.zeros(CLASSES))

    (_, found), (_, plain) = trained(task_of(loss), True), trained(task_of(loss), False)
    torch.testing.assert_close(found, plain, equal_nan=True)


@pytest.mark.parametrize("name", COMPUTED)
def test_what_needs_the_scores_has_them(name: str, make_setting: Any) -> None:
    task = task_of(COMPUTED[name])
    assert_close(trained(task, True), trained(task, False))
    assert losses_in_pieces(task) == 0
    support = LossChunks().support(make_setting(task, device=GPU))
    assert support.choices == (False,) and "straight into" in support.reason


@pytest.mark.parametrize("config", [{"amp": "bf16"}, {"batch_size": 2, "accumulation_steps": 2}])
def test_it_is_right_beside_other_techniques(config: dict[str, Any]) -> None:
    (plain_loss, plain), (loss, found) = (trained(task_of(LOSSES["view"]), on, **config) for on in (False, True))
    torch.testing.assert_close(loss, plain_loss, rtol=1e-3, atol=1e-3)
    flat, expected = (torch.cat([gradient.flatten() for gradient in all_of]) for all_of in (found, plain))
    assert torch.cosine_similarity(flat, expected, dim=0) > (0.999 if "amp" in config else 0.999999)
    assert [gradient.dtype for gradient in found] == [gradient.dtype for gradient in plain]


def test_a_hugging_face_model_has_it(make_setting: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=CLASSES,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )

    def make_batch(n: int) -> Any:
        ids = torch.randint(0, CLASSES, (n, 8))
        return {"input_ids": ids, "labels": ids}

    task = Task(build_model=lambda: GPT2LMHeadModel(config), make_batch=make_batch)
    support = LossChunks().support(make_setting(task, device=GPU))
    assert support.choices == (False, True)
    assert_close(trained(task, True), trained(task, False))


@pytest.mark.parametrize("own_loss", [True, False])
def test_scores_are_never_held_as_a_whole(own_loss: bool) -> None:
    shapes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                shapes.append(result.shape)
            return result

    task = task_of(LOSSES["view"])
    if not own_loss:
        task = dataclasses.replace(task, training_step=None)
    session = prepare(task, {"batch_size": 4, "loss_chunks": True}, device="cpu")
    with Watch():
        session.step(task.batch(4))
    assert max(shape[0] for shape in shapes if len(shape) == 2 and shape[1] == CLASSES) == 8  # the weight, turned


def test_evaluation_gives_ordinary_scores_and_nothing_is_left_of_trying_it(make_setting: Any) -> None:
    task = task_of(LOSSES["view"])
    session = prepare(task, {"loss_chunks": True}, device="cpu")
    assert type(session.model.eval()(task.batch(2)[0])) is torch.Tensor
    setting = make_setting(task)
    support = LossChunks().support(setting)
    assert support.choices == (False,) and support.optional == (True,) and "memory" in support.reason
    assert "forward" not in vars(setting.model.head)


def test_it_says_where_it_does_not_apply(make_setting: Any, make_task: Any) -> None:
    assert "4096" in LossChunks().support(make_setting(make_task(lambda: nn.Linear(8, 4)))).reason
    for other in ({"amp": "fp16"}, {"compile": "default"}):
        assert LossChunks().is_redundant(techniques.complete({"loss_chunks": True, **other}))
    with pytest.raises(UnsupportedError, match="underflow"):
        prepare(task_of(LOSSES["view"]), {"loss_chunks": True, "amp": "fp16"}, device="cpu")


class Doubled(torch.autograd.Function):
    """A custom function, which torch gives no notice of the class of its inputs."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        context.save_for_backward(x)
        return x.view(-1, x.shape[-1]).square().view(x.shape)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return 2 * context.saved_tensors[0] * gradient


class Wide(Language):
    """With layers inside that are as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__(bias=True, tied=False)
        self.up, self.down = nn.Linear(8, CLASSES), nn.Linear(CLASSES, 8)

    def forward(self, ids: Any) -> Any:
        x = torch.tanh(self.mix(self.tokens(ids)))
        return self.head(x + self.down(Doubled.apply(self.up(x))))


def wide() -> Task:
    return dataclasses.replace(task_of(LOSSES["view"]), build_model=Wide)


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_no_gradient_is_lost_in_a_custom_function(amp: str) -> None:
    loss, found = trained(wide(), True, amp=amp)
    plain_loss, plain = trained(wide(), False, amp=amp)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-3, atol=1e-3)
    for gradient, expected in zip(found, plain, strict=True):
        assert (gradient - expected).norm() <= (1e-5 if amp == "off" else 3e-2) * expected.norm()


def test_a_layer_whose_scores_reach_no_loss_is_put_back() -> None:
    session, _ = stepped(wide(), True)
    session.update()
    session.step(wide().batch(4))
    assert "forward" not in vars(session.model.up) and "forward" in vars(session.model.head)
    model = session.model
    session.step(wide().batch(4))
    assert model.head.forward.use.losses == 3


@pytest.mark.parametrize("change", [lambda s: s.mul_(2), lambda s: s.data_ptr(), lambda s: s.register_hook(print)])
def test_what_would_be_done_to_a_copy_is_an_error(change: Any) -> None:
    def loss(scores: Any, labels: Any) -> Any:
        change(scores)
        return LOSSES["view"](scores, labels)

    with pytest.raises(TypeError, match="leave loss_chunks out"):
        trained(task_of(loss), True)


def test_a_layer_in_bf16_has_its_gradient_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient(chunk_bytes: int) -> Any:
        monkeypatch.setattr(scores, "CHUNK_BYTES", (chunk_bytes,) * 2)
        torch.manual_seed(0)
        hidden = torch.ones(512, 8, dtype=torch.bfloat16)
        weight = torch.zeros(CLASSES, 8, dtype=torch.bfloat16, requires_grad=True)
        made = scores.Scores.of(hidden, weight, None, scores.Use())
        functional.cross_entropy(made, torch.zeros(512, dtype=torch.long), reduction="sum").backward()
        return weight.grad

    torch.testing.assert_close(gradient(1), gradient(2**30), rtol=1e-2, atol=0)
