from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.techniques import UnsupportedError, find_techniques
from autotune.techniques import activation_offload as module
from autotune.techniques.activation_offload import ActivationOffload

from .gpus import GPU
from .kinds import KINDS
from .test_checkpoint_segments import Block, Listed, with_gradient_penalty

techniques = find_techniques()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are small."""
    monkeypatch.setattr(module, "_SMALLEST_BYTES", 0)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every tensor that is moved to the host."""
    tensors: list[torch.Tensor] = []
    move = module._Store.move

    def watched(store: Any, tensor: torch.Tensor) -> Any:
        tensors.append(tensor)
        return move(store, tensor)

    monkeypatch.setattr(module._Store, "move", watched)
    return tensors


def gradients(task: Any, **config: Any) -> Any:
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 8, **config}, device="cpu")
    torch.manual_seed(1)
    session.accumulate(task.batch(8))
    return [p.grad.to_dense() for p in session.model.parameters() if p.grad is not None], list(session.model.buffers())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("config", [{}, {"amp": "bf16"}, {"batch_size": 4, "accumulation_steps": 2}])
def test_gradients_are_bitwise_those_of_plain_training(
    skip_unsupported: Any, kind: str, blocks: int, config: dict[str, Any]
) -> None:
    skip_unsupported(KINDS[kind](), config)
    plain = gradients(KINDS[kind](), **config)
    offloaded = gradients(KINDS[kind](), activation_offload=blocks, **config)
    torch.testing.assert_close(offloaded, plain, rtol=0, atol=0)


@pytest.mark.parametrize("changes", [{}, {"training_step": with_gradient_penalty}])
def test_dropout_and_derivatives_in_the_loss_are_the_same(make_task: Any, changes: dict[str, Any]) -> None:
    task = make_task(lambda: Listed(lambda: Block(dropout=0.5)), **changes)
    torch.testing.assert_close(gradients(task, activation_offload=6), gradients(task), rtol=0, atol=0)


def test_a_sparse_activation_stays_on_the_device(make_task: Any, moved: list[torch.Tensor]) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Any) -> Any:
            return torch.sparse.mm(x.detach().to_sparse(), self.weight)

    gradients(make_task(lambda: Listed(Sparse)), activation_offload=1)
    assert all(tensor.layout is torch.strided for tensor in moved)


def test_activations_are_moved_once_and_parameters_never(make_task: Any, moved: list[torch.Tensor]) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return sum(branch(x) for branch in self.branches)

    gradients(
        make_task(lambda: nn.Sequential(nn.Sequential(Branching(), Branching()), nn.Linear(8, 4))), activation_offload=2
    )
    assert [tuple(tensor.shape) for tensor in moved] == [(8, 8), (8, 8)]  # the input of each block


def test_more_blocks_move_more(make_task: Any, moved: list[torch.Tensor]) -> None:
    moved_bytes = []
    for blocks in (1, 3, 6):
        moved.clear()
        gradients(make_task(Listed), activation_offload=blocks)
        moved_bytes.append(sum(tensor.nbytes for tensor in moved))
    assert moved_bytes[2] == 2 * moved_bytes[1] == 6 * moved_bytes[0] > 0


def test_evaluation_moves_nothing_and_a_deep_copy_is_its_own(make_task: Any, moved: list[torch.Tensor]) -> None:
    session = prepare(make_task(Listed), {"activation_offload": 6}, device="cpu")
    average = copy.deepcopy(session.model).eval()
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.zero_()
    assert average(torch.randn(2, 8)).abs().sum() > 0
    assert not moved


def test_repeated_blocks_on_a_gpu_have_it(make_setting: Any, make_task: Any) -> None:
    support = ActivationOffload().support
    assert support(make_setting(KINDS["transformer"](), device=GPU)).choices == (0, 1, 2, 3)
    assert "device's" in support(make_setting(KINDS["transformer"]())).reason
    assert "no Sequential" in support(make_setting(make_task(lambda: nn.Linear(8, 4)), device=GPU)).reason


def test_it_is_not_combined_with_recomputation(make_task: Any) -> None:
    both = {"activation_offload": 1, "checkpoint_segments": 1}
    assert ActivationOffload().is_redundant(techniques.complete(both))
    with pytest.raises(UnsupportedError, match="recomputed"):
        prepare(make_task(Listed), both, device="cpu")
    with pytest.raises(UnsupportedError, match="the model has 6 blocks"):
        prepare(make_task(Listed), {"activation_offload": 7}, device="cpu")
