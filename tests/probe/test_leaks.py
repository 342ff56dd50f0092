"""A leak is named: what is kept of every step, and the line that made it."""

import inspect

import pytest
import torch
from torch import nn

from autotune.probe.leaks import kept
from autotune.session import prepare
from autotune.task import Task

torch.set_num_threads(1)
KEPT = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        out = self.layers(x)
        self.mean = 0.9 * self.mean + out.detach().mean(0)  # a new one each time, and the old one is gone
        return out


def keeps_nothing(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def keeps_losses(model, batch):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    KEPT.append(loss)
    return loss


def keeps_graphs(model, batch):
    KEPT.append(model(batch[0]).exp().sum())  # nothing frees this graph
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def keeps_outputs(model, batch):
    output = model(batch[0])
    KEPT.append({"logits": output.detach().clone()})
    return nn.functional.cross_entropy(output, batch[1])


def keeps_gradients(model, batch):
    output = model(batch[0])
    output.register_hook(KEPT.append)
    return nn.functional.cross_entropy(output, batch[1])


def leaks_of(training_step, **choices):
    KEPT.clear()
    task = Task(
        build_model=Net, make_batch=lambda n: (torch.randn(n, 6), torch.arange(n) % 3), training_step=training_step
    )
    session = prepare(task, {"batch_size": 8, **choices}, device="cpu")
    batches = session.loader.micro_batches()
    session.step(next(batches)[0])  # the optimizer's state is made once
    try:
        return kept(lambda: session.step(next(batches)[0]))
    finally:
        KEPT.clear()


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    number = next(first + index for index, line in enumerate(lines) if text in line)
    return f"test_leaks.py, line {number} (`{lines[number - first].strip()}`)"


@pytest.mark.parametrize("choices", [{}, {"amp": "bf16"}, {"optimizer_impl": "for-loop"}])
def test_training_that_keeps_nothing_has_nothing_named(choices):
    assert leaks_of(keeps_nothing, **choices) == ()


def test_a_list_of_losses_is_named_by_the_line_that_made_them():
    (losses,) = leaks_of(keeps_losses)
    place = line_of(keeps_losses, "cross_entropy")
    assert str(losses) == f"1 float32 tensor of shape (), with its autograd graph, made in {place}"


def test_what_only_a_graph_holds_comes_after_what_the_code_holds():
    held, *behind = leaks_of(keeps_graphs)
    assert (held.place, held.shape, held.in_graph) == (line_of(keeps_graphs, "exp()"), (), False)
    assert all(kind.in_graph for kind in behind)
    assert behind[0].shape == (8, 50)
    assert behind[0].place == line_of(Net.forward, "self.layers(x)")


def test_a_list_of_outputs_is_named_by_the_line_that_made_them():
    (outputs,) = leaks_of(keeps_outputs)
    assert str(outputs) == f"1 float32 tensor of shape (8, 3) made in {line_of(keeps_outputs, 'clone()')}"
    assert outputs.num_bytes == 8 * 3 * 4


def test_what_was_made_in_the_backward_pass_is_said_to_be():
    (gradients,) = leaks_of(keeps_gradients)
    assert str(gradients) == "1 float32 tensor of shape (8, 3) made in the backward pass"
