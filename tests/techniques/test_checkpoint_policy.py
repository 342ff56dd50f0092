from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from autotune import prepare
from autotune.task import Task
from autotune.techniques import find_techniques
from autotune.techniques.checkpoint_policy import CheckpointPolicy

from .gpus import GPU
from .kinds import KINDS
from .test_checkpoint_segments import Block, Chained, Listed, with_gradient_penalty

techniques = find_techniques()

SELECTIVE = {"checkpoint_policy": "selective"}


def gradients(task: Task, **config: Any) -> Any:
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 8, **config}, device="cpu")
    batch = task.batch(8)
    torch.manual_seed(1)
    session.step(batch)
    torch.manual_seed(2)
    session.accumulate(batch)
    return [p.grad.to_dense() for p in session.model.parameters() if p.grad is not None], list(session.model.buffers())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("config", [{}, {"amp": "bf16"}, {"batch_size": 4, "accumulation_steps": 2}])
def test_gradients_and_buffers_are_those_without_recomputation(
    skip_unsupported: Any, kind: str, segments: int, config: dict[str, Any]
) -> None:
    skip_unsupported(KINDS[kind](), config)
    plain = gradients(KINDS[kind](), **config)
    selective = gradients(KINDS[kind](), checkpoint_segments=segments, **SELECTIVE, **config)
    torch.testing.assert_close(selective, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", [Listed, Chained])
def test_dropout_draws_the_same_masks_when_recomputing(make_task: Any, model: Any) -> None:
    task = make_task(lambda: model(lambda: Block(dropout=0.5)))
    torch.testing.assert_close(
        gradients(task, checkpoint_segments=3, **SELECTIVE), gradients(task), rtol=1e-6, atol=1e-7
    )


def test_attention_with_dropout_runs_again_so_that_what_follows_draws_the_same_numbers() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            heads = self.mix(x)[:, None]
            mixed = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)[:, 0]
            return x + functional.dropout(functional.gelu(mixed), 0.3)

    task = Task(
        build_model=lambda: nn.Sequential(nn.Sequential(Attention(), Attention()), nn.Flatten(), nn.Linear(32, 4)),
        make_batch=lambda n: (torch.randn(n, 4, 8), torch.randint(0, 4, (n,))),
    )
    torch.testing.assert_close(
        gradients(task, checkpoint_segments=2, **SELECTIVE), gradients(task), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("model", [Listed, Chained])
def test_a_loss_that_takes_derivatives_itself_is_the_same(make_task: Any, model: Any) -> None:
    task = make_task(model, training_step=with_gradient_penalty)
    torch.testing.assert_close(
        gradients(task, checkpoint_segments=3, **SELECTIVE), gradients(task), rtol=1e-5, atol=1e-7
    )


class Products(TorchDispatchMode):
    """Counts the matrix products that are really computed."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return function(*args, **(kwargs or {}))


def num_products(task: Task, **config: Any) -> int:
    session = prepare(task, {"batch_size": 8, **config}, device="cpu")
    with Products() as products:
        session.accumulate(task.batch(8))
    return products.count


def test_matrix_products_are_not_computed_again(make_task: Any) -> None:
    task = make_task(Listed)
    assert num_products(task, checkpoint_segments=6) > num_products(task)
    assert num_products(task, checkpoint_segments=6, **SELECTIVE) == num_products(task)


def test_without_recomputation_it_is_not_searched() -> None:
    redundant = CheckpointPolicy().is_redundant
    assert redundant(techniques.complete(SELECTIVE))
    assert not redundant(techniques.complete({"checkpoint_segments": 1, **SELECTIVE}))


def test_blocks_on_a_gpu_have_it_and_trying_it_leaves_no_trace(make_setting: Any) -> None:
    setting = make_setting(KINDS["transformer"](), device=GPU)
    assert CheckpointPolicy().support(setting).choices == ("full", "selective")
    assert not any("forward" in vars(module) for module in setting.model.modules())
    assert all(parameter.grad is None for parameter in setting.model.parameters())


def test_what_is_changed_in_place_cannot_be_kept(make_setting: Any, make_task: Any) -> None:
    class InPlace(Block):
        def forward(self, x: Any) -> Any:
            return x + self.down(functional.relu_(self.up(x)))

    setting = make_setting(make_task(lambda: Listed(InPlace)), device=GPU)
    with pytest.raises(RuntimeError, match="mutated"):  # which an inspection gives as the reason
        CheckpointPolicy().support(setting)
    assert not any("forward" in vars(module) for module in setting.model.modules())


def test_it_says_where_it_does_not_apply(make_setting: Any, make_task: Any) -> None:
    on_a_cpu = CheckpointPolicy().support(make_setting(KINDS["transformer"]()))
    assert on_a_cpu.choices == ("full",) and on_a_cpu.optional == ("selective",) and on_a_cpu.reason
    without = CheckpointPolicy().support(make_setting(make_task(lambda: nn.Linear(8, 4)), device=GPU))
    assert "no Sequential or ModuleList" in without.reason
