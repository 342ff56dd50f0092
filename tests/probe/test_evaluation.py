"""What is there when evaluation is measured: the state that training holds, and no gradients."""

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.probe.evaluation import train_a_step
from autotune.task import Task


@pytest.mark.parametrize("amp", ["off", "fp16"])
def test_a_training_step_that_is_not_skipped_makes_the_optimizers_state(amp):
    def training_step(model, batch):
        return model(batch).square().mean() * 1e3  # overflows in fp16, as long as it is scaled by much

    task = Task(
        build_model=lambda: nn.Linear(8, 8), make_batch=lambda n: torch.randn(n, 8), training_step=training_step
    )
    session = prepare(task, {"batch_size": 4, "amp": amp}, device="cpu")
    train_a_step(session, task.batch(2), 2)
    parameters = list(session.model.parameters())
    assert all("exp_avg" in session.optimizer.state[parameter] for parameter in parameters)
    assert all(parameter.grad is None for parameter in parameters)
    assert session.scaler is None or session.scaler.get_scale() < 65536
