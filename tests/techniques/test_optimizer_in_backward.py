from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune import prepare
from autotune.errors import ConfigError
from autotune.probe.checks import run_checks
from autotune.techniques import UnsupportedError, find_techniques
from autotune.techniques.optimizer_in_backward import OptimizerInBackward

from .kinds import KINDS, sgd

techniques = find_techniques()


def trained(task: Any, on: bool, **config: Any) -> Any:
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 8, "optimizer_in_backward": on, **config}, device="cpu")
    torch.manual_seed(1)
    for _ in range(3):
        session.step(task.batch(8))
    return session


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [{}, {"optimizer_impl": "foreach"}, {"checkpoint_segments": 2}])
def test_parameters_are_bitwise_those_of_plain_training(kind: str, config: dict[str, Any]) -> None:
    plain, session = (trained(KINDS[kind](), on, **config) for on in (False, True))
    for expected, found in zip(plain.model.parameters(), session.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_no_gradient_is_left_after_the_backward_pass() -> None:
    task = KINDS["transformer"]()
    session = trained(task, True)
    session.accumulate(task.batch(8))
    assert all(parameter.grad is None for parameter in session.model.parameters())


def test_optimizer_groups_and_state_are_the_tasks_own() -> None:
    plain, session = (trained(KINDS["transformer"](), on).optimizer.state_dict() for on in (False, True))
    torch.testing.assert_close(session, plain, rtol=0, atol=0)


def test_a_scheduler_sets_the_learning_rate() -> None:
    task = KINDS["frozen"]()
    session = prepare(task, {"batch_size": 8, "optimizer_in_backward": True}, device="cpu")
    scheduler = torch.optim.lr_scheduler.LambdaLR(session.optimizer, lambda step: 0.0)
    before = [p.detach().clone() for p in session.model.parameters()]
    session.optimizer.param_groups[0]["weight_decay"] = 0.0
    session.step(task.batch(8))
    scheduler.step()
    assert all(torch.equal(p, b) for p, b in zip(session.model.parameters(), before, strict=True))


def test_a_larger_batch_is_refused_before_anything_is_updated() -> None:
    task = KINDS["frozen"]()
    session = trained(task, True)
    before = [p.detach().clone() for p in session.model.parameters()]
    with pytest.raises(ConfigError, match="2 micro batches, but optimizer_in_backward"):
        session.step(task.batch(16))
    assert all(torch.equal(p, b) for p, b in zip(session.model.parameters(), before, strict=True))


@pytest.mark.parametrize("config", [{"accumulation_steps": 2}, {"amp": "fp16"}])
def test_what_needs_all_gradients_is_not_combined_with_it(config: dict[str, Any]) -> None:
    on = {"optimizer_in_backward": True, **config}
    assert OptimizerInBackward().is_redundant(techniques.complete(on))
    with pytest.raises(UnsupportedError, match="optimizer_in_backward"):
        prepare(KINDS["transformer"](), on, device="cpu")


def test_it_says_where_it_does_not_apply(make_setting: Any, make_task: Any) -> None:
    def support(**changes: Any) -> Any:
        return OptimizerInBackward().support(make_setting(make_task(lambda: torch.nn.Linear(8, 4), **changes)))

    class Own(torch.optim.SGD):
        pass

    assert support(configure_optimizers=sgd).optional == (True,)
    assert "all of them" in support(max_grad_norm=1.0).reason
    assert "Own" in support(configure_optimizers=lambda model: Own(model.parameters(), lr=0.1)).reason
    lbfgs = support(configure_optimizers=lambda model: torch.optim.LBFGS(model.parameters()))
    assert "LBFGS" in lbfgs.reason and not lbfgs.optional


def test_the_comparison_with_plain_training_sees_its_gradients() -> None:
    check = run_checks(KINDS["transformer"](), {"optimizer_in_backward": True}, "cpu", batch_size=4)
    assert check.passed and check.gradient_error < 1e-6 and check.gradient_cosine > 0.9999
