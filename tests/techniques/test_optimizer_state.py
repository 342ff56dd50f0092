from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autotune import prepare
from autotune.devices import Device, open_device
from autotune.devices.targets import AbsentGpu
from autotune.records.device import DeviceInfo
from autotune.techniques import UnsupportedError, find_techniques, optimizer_state
from autotune.techniques.optimizer_state import OptimizerState

from .kinds import KINDS
from .test_on_every_kind import error

techniques = find_techniques()

LOW_BIT = ("8bit", "4bit")
GPU = DeviceInfo(name="cuda", model="a GPU", total_bytes=2**34, free_bytes=2**34, capability=(9, 0))


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torchao without its compiling, which takes seconds for each shape."""
    yield pytest.importorskip("torchao.optim", reason="torchao is not installed")
    torch.compiler.set_stance("default")


@pytest.fixture
def eager(torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "why_not_compiled", lambda device: "")  # without compiling, no compiler is needed
    torch.compiler.set_stance("force_eager")


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    decayed = {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.2, "lr": 3e-3}
    return torch.optim.Adam(
        [decayed, {"params": [p for p in model.parameters() if p.dim() == 1]}],
    )


def trained(task: Any, choice: str, steps: int = 3, **config: Any) -> Any:
    assert not task.takes_whole_steps  # builds a model to find that out, the first time
    torch.manual_seed(0)
    session = prepare(task, {"batch_size": 8, "optimizer_state": choice, **config}, device="cpu")
    torch.manual_seed(1)
    for _ in range(steps):
        session.step(task.batch(8))
    return session


def movement(session: Any) -> torch.Tensor:
    torch.manual_seed(0)
    start = session.task.model()
    pairs = zip(session.model.parameters(), start.parameters(), strict=True)
    return torch.cat([(p.detach().float() - before.detach()).flatten() for p, before in pairs])


def state_bytes(session: Any) -> float:
    """Bytes of state for each value of the parameters whose state can be short."""
    found = 0
    parameters = [p for p in session.model.parameters() if p.numel() >= 4096]
    for p in parameters:
        for value in session.optimizer.state[p].values():
            parts = [getattr(value, name) for name in getattr(value, "tensor_attrs", ())] or [value]
            found += sum(part.nbytes for part in parts)
    return found / sum(p.numel() for p in parameters)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("choice", "bound"), [("8bit", 0.1), ("4bit", 0.4)])
def test_three_steps_with_every_state_in_few_bits_lead_nearly_as_far(
    kind: str, choice: str, bound: float, torchao: Any, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(self: Any, p: torch.Tensor, signed: bool) -> torch.Tensor:
        if p.numel() % 2:  # 4 bits come in pairs
            return torch.zeros_like(p)
        return self._subclass_zeros(p, signed, math.gcd(p.numel(), self.block_size))

    monkeypatch.setattr(torchao.AdamW8bit.__base__, "_new_buffer", short)  # also for parameters of a few values
    task = KINDS[kind]()
    if task.configure_optimizers is not None:
        with pytest.raises(UnsupportedError, match="the task's optimizer is SGD"):
            trained(task, choice)
        return
    assert error(movement(trained(task, choice)), movement(trained(task, "default"))) < bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [{}, {"optimizer_impl": "foreach"}, {"optimizer_in_backward": True}])
def test_a_step_on_the_host_is_the_tasks_own(kind: str, config: dict[str, Any]) -> None:
    plain, session = (trained(KINDS[kind](), choice, **config) for choice in ("default", "cpu"))
    for expected, found in zip(plain.model.parameters(), session.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    state = session.optimizer.state_dict(), plain.optimizer.state_dict()
    torch.testing.assert_close(*state, rtol=0, atol=0)


def test_state_takes_the_bytes_that_the_bits_say(make_task: Any, eager: None) -> None:
    found = {choice: state_bytes(trained(make_task(wide), choice)) for choice in ("default", "cpu", *LOW_BIT)}
    assert found["default"] == found["cpu"] == pytest.approx(8, rel=1e-3)
    assert found["8bit"] == pytest.approx(2 + 2 * 4 / 256, rel=0.1)  # with a scale of 4 bytes for each 256
    assert found["4bit"] == pytest.approx(1 + 2 * 4 / 128, rel=0.1)


@pytest.mark.parametrize("choice", LOW_BIT)
def test_groups_hooks_schedulers_and_rates_set_by_hand_stay(make_task: Any, eager: None, choice: str) -> None:
    seen: list[str] = []
    kept: list[Any] = []

    def configure(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adam(model)
        optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
        kept.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 1 else 0.0))
        return optimizer

    session = prepare(make_task(wide, configure_optimizers=configure), {"optimizer_state": choice}, device="cpu")
    optimizer = session.optimizer
    assert type(optimizer) is torch.optim.Adam and kept[-1].optimizer is optimizer
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(3e-3, 0.2), (1e-3, 0)]
    before = movement(session)
    session.step(session.task.batch(8))
    assert seen == ["stepped"] and not torch.equal(movement(session), before)
    with pytest.warns(UserWarning, match="overridden after learning rate scheduler"):  # it was
        kept[-1].step()
    before = movement(session)
    session.step(session.task.batch(8))
    assert torch.equal(movement(session), before)
    optimizer.param_groups[0]["lr"] = 1e-2
    session.step(session.task.batch(8))
    assert not torch.equal(movement(session), before)


@pytest.mark.parametrize("choice", [*LOW_BIT, "cpu"])
@pytest.mark.parametrize("config", [{}, {"param_dtype": "bf16"}])
def test_training_goes_on_from_a_saved_state(make_task: Any, eager: None, choice: str, config: dict[str, Any]) -> None:
    task = make_task(wide, configure_optimizers=adam)
    first = trained(task, choice, **config)
    second = prepare(task, first.config, device="cpu")
    second.model.load_state_dict(first.model.state_dict())
    torch.save(first.optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    second.optimizer.load_state_dict(torch.load(file))
    batch = task.batch(8)
    for session in (first, second):
        torch.manual_seed(2)
        before = movement(session)
        session.step(batch)
        session.moved = movement(session) - before
    # in bf16, state and lower halves are rounded where they are loaded
    assert error(second.moved, first.moved) < (0.5 if config else 1e-6)


@pytest.mark.parametrize(
    ("config", "cosine"),
    # bf16 has three significant digits, to which three steps are rounded stochastically
    [({"optimizer_in_backward": True}, 0.98), ({"amp": "bf16"}, 0.9), ({"param_dtype": "bf16"}, 0.7)],
)
def test_few_bits_go_together_with(make_task: Any, eager: None, config: dict[str, Any], cosine: float) -> None:
    task = make_task(wide)
    plain, session = trained(task, "default"), trained(task, "8bit", **config)
    assert state_bytes(session) < 2.2
    assert torch.cosine_similarity(movement(session), movement(plain), dim=0) > cosine


@pytest.mark.parametrize("choice", ["8bit", "cpu"])
def test_steps_that_overflow_in_fp16_are_skipped(make_task: Any, eager: None, choice: str) -> None:
    def fused(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), fused=True)

    session = trained(make_task(wide, configure_optimizers=fused), choice, steps=0, amp="fp16")
    session.scaler.scale(torch.ones(()))  # makes the scale, which is then set too high
    session.scaler.update(2.0**40)
    session.step(session.task.batch(8))
    assert not movement(session).any()
    for _ in range(40):
        session.step(session.task.batch(8))
    assert movement(session).isfinite().all() and movement(session).any()


def test_an_implementation_of_torchs_own_is_not_combined_with_few_bits(make_task: Any, eager: None) -> None:
    both = {"optimizer_state": "8bit", "optimizer_impl": "fused"}
    assert OptimizerState().is_redundant(techniques.complete(both))
    assert not OptimizerState().is_redundant(techniques.complete({**both, "optimizer_state": "cpu"}))
    with pytest.raises(UnsupportedError, match="one implementation"):
        prepare(make_task(wide), both, device="cpu")


def test_a_torchao_that_does_not_work_with_this_torch_is_said_to_be_at_fault(
    make_task: Any, torchao: Any, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UnsupportedError, match=r"torchao [\d.]+ does not work with torch .*install another release"):
        prepare(make_task(wide), {"optimizer_state": "8bit"}, device="cpu")


def test_it_says_where_it_does_not_apply(make_setting: Any, make_task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def support(device: Any = "cpu", **options: Any) -> Any:
        kind = options.pop("kind", torch.optim.AdamW)
        task = make_task(wide, configure_optimizers=lambda model: kind(model.parameters(), **options))
        return OptimizerState().support(make_setting(task, device=device))

    gpu = AbsentGpu(GPU)
    monkeypatch.setattr(Device, "why_not_compiled", lambda device: "")
    monkeypatch.setattr(optimizer_state, "find_spec", lambda name: name)
    assert support().optional == LOW_BIT and "cpu: the model trains on the CPU already" in support().reason
    assert support(gpu).optional == (*LOW_BIT, "cpu")
    assert support(gpu).choices == ("default",)  # searched only if included
    assert "the task's optimizer is SGD" in support(gpu, kind=torch.optim.SGD, lr=0.1).reason
    assert support(gpu, kind=torch.optim.SGD, lr=0.1).optional == ("cpu",)
    assert "maximize=True" in support(maximize=True).reason
    assert "LBFGS needs all gradients at once" in support(gpu, kind=torch.optim.LBFGS).reason
    assert "capturable=True" in support(gpu, capturable=True).reason
    monkeypatch.setattr(optimizer_state, "find_spec", lambda name: None)
    assert "pip install 'autotune-torch[lean]'" in support().reason and not support().optional


@pytest.mark.slow
@pytest.mark.parametrize("choice", LOW_BIT)
def test_compiled_steps_lead_as_far(make_task: Any, torchao: Any, choice: str) -> None:
    if reason := open_device("cpu").why_not_compiled():
        pytest.skip(reason)
    sessions = [trained(make_task(wide), other) for other in ("default", choice)]
    assert error(movement(sessions[1]), movement(sessions[0])) < (0.1 if choice == "8bit" else 0.3)
