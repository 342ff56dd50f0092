"""A frozen part gets no gradient and no optimizer state; all else trains as if nothing were frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.errors import ConfigError
from autotune.probe.checks import run_checks
from autotune.probe.inspection import inspect_task
from autotune.task import Task
from autotune.techniques import find_techniques
from autotune.techniques.freeze import Freeze

from .kinds import KINDS, block, residual, sgd

narrow_task = find_techniques().narrow_task

SAMPLES = 4
# the first of several blocks, or a part by its name; of every kind something is left to train
PARTS = {
    "transformer": "blocks:1",
    "residual": "blocks:2",
    "recurrent": "tokens+layers.0",
    "unet": "down",
    "sparse": "blocks:1",
    "frozen": "blocks:2",
}


def stepped(kind: str, freeze: str, **config: Any) -> Any:
    """A session after one optimizer step, and the gradients by name."""
    torch.manual_seed(0)
    task = KINDS[kind]()
    session = prepare(task, {"batch_size": SAMPLES, "freeze": freeze, **config}, device="cpu")
    gradients: dict[str, Any] = {}
    for name, parameter in session.model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda found, name=name: gradients.setdefault(name, found.clone()))
    torch.manual_seed(1)
    session.step(task.batch(SAMPLES))
    return session, gradients


@pytest.mark.parametrize("config", [{}, {"checkpoint_segments": 2}, {"optimizer_in_backward": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_frozen_gets_the_gradients_of_plain_training(kind: str, config: dict[str, Any]) -> None:
    _, plain = stepped(kind, "none")
    session, gradients = stepped(kind, PARTS[kind], **config)
    frozen = [p for p in session.model.parameters() if not p.requires_grad]
    assert frozen and 0 < len(gradients) < len(list(session.model.parameters()))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.to_dense(), plain[name].to_dense())
    assert all(parameter.grad is None and parameter not in session.optimizer.state for parameter in frozen)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_over_all_parameters_does_not_move_what_is_frozen(kind: str) -> None:
    torch.manual_seed(0)
    task = narrow_task(KINDS[kind](), {"freeze": PARTS[kind]})
    model = task.model()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1) if kind != "sparse" else sgd(model)
    task.loss(model, task.batch(SAMPLES)).backward()
    optimizer.step()
    assert before and all(torch.equal(model.get_parameter(name), value) for name, value in before.items())


def test_frozen_batch_normalisation_keeps_its_mode_and_goes_on_with_its_statistics() -> None:
    session, _ = stepped("residual", "blocks:3")
    norm = session.model.get_submodule("1.0.layers.1")
    assert norm.training and not norm.weight.requires_grad and int(norm.num_batches_tracked) == 1


def test_leading_blocks_take_along_what_is_registered_before_them_but_for_what_others_share() -> None:
    model = narrow_task(KINDS["residual"](), {"freeze": "blocks:1"}).model()
    assert (
        not model.get_parameter("0.weight").requires_grad and model.get_parameter("1.1.layers.0.weight").requires_grad
    )
    tied = narrow_task(KINDS["transformer"](), {"freeze": "blocks:3"}).model()
    assert (
        tied.get_parameter("tokens.weight").requires_grad and not tied.get_parameter("blocks.2.up.bias").requires_grad
    )


def test_it_is_offered_as_quarters_of_the_blocks_or_by_the_names_of_the_task(make_setting: Any, make_task: Any) -> None:
    def support(depth: int, **changes: Any) -> Any:
        def build_model() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(block() for _ in range(depth))), nn.Linear(8, 4))

        return Freeze().support(make_setting(make_task(build_model, **changes)))

    assert support(8).choices == ("none",)
    assert support(8).optional == ("blocks:2", "blocks:4", "blocks:6", "blocks:8")
    assert support(2).optional == ("blocks:1", "blocks:2")
    named = support(2, freeze=["0", "1.0", "0+1+2", "encoder"])
    assert named.optional == ("0", "1.0")
    assert "0+1+2 leaves nothing to train" in named.reason and "no parameter in 'encoder'" in named.reason
    assert "checkpoint_blocks" in Freeze().support(make_setting(make_task(lambda: nn.Linear(8, 4)))).reason


def test_blocks_are_not_offered_where_their_order_in_the_model_says_nothing(make_setting: Any, make_task: Any) -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)
            self.blocks = nn.ModuleList(block() for _ in range(3))

        def forward(self, x: Any) -> Any:
            for one in self.blocks:
                x = one(x)
            return self.head(x)

    support = Freeze().support(make_setting(make_task(HeadFirst)))
    assert not support.optional and support.reason.startswith(
        "head is registered before the blocks but runs after them"
    )


def test_what_the_model_does_not_have_is_refused() -> None:
    task = Task(build_model=residual, make_batch=KINDS["residual"]().make_batch)
    with pytest.raises(ConfigError, match="no parameter in 'encoder'; expected a part of: 0, 1"):
        prepare(task, {"freeze": "encoder"}, device="cpu")
    with pytest.raises(ConfigError, match="the model has 3 blocks"):
        prepare(task, {"freeze": "blocks:4"}, device="cpu")


def test_gradients_are_compared_with_plain_training_of_the_same_part() -> None:
    check = run_checks(KINDS["transformer"](), {"freeze": "blocks:2", "checkpoint_segments": 1}, "cpu", batch_size=4)
    assert check.passed and check.exact and check.choice == "checkpoint_segments=1"


def test_a_baseline_may_freeze_and_what_it_trains_is_inspected(make_task: Any) -> None:
    task = make_task(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), freeze=["0"], baseline={"freeze": "0"})
    found = inspect_task(task, device="cpu", memory_limit_bytes=None)
    assert (found["facts"]["num_parameters"], found["facts"]["num_trainable"]) == (108, 36)
    assert found["baseline"]["freeze"] == "0"
    assert (found["support"]["freeze"]["choices"], found["support"]["freeze"]["optional"]) == (("0",), ("none",))


def test_a_choice_in_words() -> None:
    assert [Freeze().label(choice) for choice in ("none", "encoder", "blocks:1")] == [
        "nothing frozen",
        "encoder frozen",
        "1 block frozen",
    ]
