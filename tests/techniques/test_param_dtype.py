from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.devices.targets import AbsentGpu
from autotune.probe.checks import run_checks
from autotune.techniques import UnsupportedError, find_techniques, param_dtype
from autotune.techniques.param_dtype import ParamDtype
from autotune.techniques.tensors import copies

from .kinds import KINDS
from .test_on_every_kind import error
from .test_optimizer_state import GPU, movement, wide

techniques = find_techniques()

BF16 = {"param_dtype": "bf16"}


def trained(task: Any, config: dict[str, Any], steps: int = 3, samples: int = 8) -> Any:
    assert not task.takes_whole_steps  # builds a model to find that out, the first time
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 8, **config}, device="cpu")
    torch.manual_seed(1)
    batch = task.batch(samples)
    for _ in range(steps):
        session.step(batch)
    return session


def test_200_small_updates_are_not_lost_where_naive_bf16_loses_them(make_task: Any) -> None:
    def configure(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)

    task = make_task(lambda: nn.Linear(8, 4), configure_optimizers=configure)
    naive = make_task(
        lambda: nn.Linear(8, 4).bfloat16(),
        configure_optimizers=configure,
        training_step=lambda model, batch: nn.functional.cross_entropy(model(batch[0].bfloat16()).float(), batch[1]),
    )
    plain, session, lost = trained(task, {}, 200), trained(task, BF16, 200), trained(naive, {}, 200)
    assert error(movement(session), movement(plain)) < 0.1  # of which rounding the result to bf16 is half
    assert (movement(lost) == 0).float().mean() > 0.75


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"accumulation_steps": 2},
        {"checkpoint_segments": 2},
        {"optimizer_impl": "fused"},
        {"optimizer_in_backward": True},
    ],
)
def test_three_steps_lead_where_fp32_leads(kind: str, config: dict[str, Any]) -> None:
    task = KINDS[kind]()
    if kind == "sparse" and "optimizer_impl" in config:
        pytest.skip("fused optimizers take no sparse gradients")
    samples = 8 * config.get("accumulation_steps", 1)
    plain, session = (trained(task, {**config, **more}, samples=samples) for more in ({}, BF16))
    assert torch.cosine_similarity(movement(session), movement(plain), dim=0) > 0.9  # Adam's first steps are signs
    torch.testing.assert_close(list(session.model.buffers()), list(plain.model.buffers()), rtol=0.1, atol=0.02)


def test_what_has_vectors_alone_and_sparse_embeddings_stay_in_fp32() -> None:
    def types(kind: str) -> dict[str, set[torch.dtype]]:
        model = prepare(KINDS[kind](), BF16, device="cpu").model
        found: dict[str, set[torch.dtype]] = {}
        for module in model.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    found.setdefault(type(module).__name__, set()).add(tensor.dtype)
        return found

    assert types("residual") == {"Conv2d": {torch.bfloat16}, "BatchNorm2d": {torch.float32}, "Linear": {torch.bfloat16}}
    assert types("sparse") == {"EmbeddingBag": {torch.float32}, "Linear": {torch.bfloat16}}
    assert types("frozen") == {"Linear": {torch.bfloat16}}


def test_it_takes_14_bytes_a_parameter_with_adamw_and_fp32_takes_16(
    make_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Seen(copies.CopySteps):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(copies, "CopySteps", Seen)

    def bytes_each(config: dict[str, Any]) -> float:
        session = trained(make_task(lambda: nn.Linear(8, 4, bias=False)), config)
        session.accumulate(session.task.batch(8))
        (p,) = session.model.parameters()
        state = [value for value in session.optimizer.state[p].values() if value.dim()]
        lower = [tensor for steps in made for tensor in steps.lower.values()]
        return sum(tensor.nbytes for tensor in (p, p.grad, *state, *lower)) / p.numel()

    assert (bytes_each({}), bytes_each(BF16)) == (16, 14)


def test_parameters_that_user_code_sets_are_what_is_trained_on(make_task: Any) -> None:
    session = trained(make_task(lambda: nn.Linear(8, 4)), BF16)
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.zero_()
    for group in session.optimizer.param_groups:
        group["lr"] = 0.0
    session.step(session.task.batch(8))
    assert all((parameter == 0).all() for parameter in session.model.parameters())


def test_gradients_are_clipped(make_task: Any) -> None:
    task = make_task(
        wide, max_grad_norm=0.01, configure_optimizers=lambda model: torch.optim.SGD(model.parameters(), lr=100.0)
    )
    moved = movement(trained(task, BF16, steps=1)).norm()
    assert moved == pytest.approx(100 * 0.01, rel=0.05)


def test_it_is_autocast_already(make_task: Any) -> None:
    both = {**BF16, "amp": "bf16"}
    assert ParamDtype().is_redundant(techniques.complete(both))
    with pytest.raises(UnsupportedError, match="leave amp off"):
        prepare(make_task(wide), both, device="cpu")


def test_it_says_where_it_does_not_apply(make_setting: Any, make_task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def support(build: Any = wide, device: Any = "cpu", **changes: Any) -> Any:
        return ParamDtype().support(make_setting(make_task(build, **changes), device=device))

    class Own(torch.optim.SGD):
        pass

    assert support().choices == ("fp32",) and support().optional == ("bf16",)
    assert "fp8: products in fp8 need a GPU of compute capability 8.9, this is a CPU" in support().reason
    own = support(configure_optimizers=lambda model: Own(model.parameters(), lr=0.1))
    assert "bf16: Own is no optimizer of torch.optim" in own.reason and not own.optional
    gpu = AbsentGpu(GPU)
    monkeypatch.setattr(param_dtype, "find_spec", lambda name: name)
    assert support(device=gpu).optional == ("bf16", "fp8")
    assert "multiples of 16" in support(lambda: nn.Linear(8, 4), gpu).reason
    monkeypatch.setattr(param_dtype, "find_spec", lambda name: None)
    assert "pip install 'autotune-torch[lean]'" in support(device=gpu).reason


def test_support_leaves_the_model_as_it_was(make_setting: Any, make_task: Any) -> None:
    setting = make_setting(make_task(wide))
    before = [parameter.detach().clone() for parameter in setting.model.parameters()]
    assert ParamDtype().support(setting).optional
    assert all(map(torch.equal, setting.model.parameters(), before))


def test_the_comparison_with_fp32_passes() -> None:
    check = run_checks(KINDS["transformer"](), BF16, "cpu", batch_size=4)
    assert check.passed and not check.exact, check


def test_products_rounded_to_fp8_train_nearly_as_fp32(make_task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    monkeypatch.setattr(param_dtype, "EMULATED", True)
    task = make_task(lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)))
    gradients = []
    for config in ({}, {"param_dtype": "fp8"}):
        session = trained(task, config, steps=0)
        session.accumulate(task.batch(8))
        gradients.append(torch.cat([p.grad.flatten() for p in session.model.parameters()]))
        assert list(session.model.state_dict()) == list(wide().state_dict())
    assert 0.98 < torch.cosine_similarity(*gradients, dim=0) < 0.999999
