"""Every technique computes what training without it does on six kinds of model, alone (in plain fp32) and beside the
techniques that it meets most often."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from autotune import prepare
from autotune.techniques import Phase, find_techniques
from autotune.techniques import compile as techniques_compile

from .kinds import KINDS

TECHNIQUES = find_techniques()
complete = find_techniques().complete
keep_settings = find_techniques().keep_settings

# Choices that can be applied on a CPU, be it that only a GPU gains by them.
CHOICES: dict[str, tuple[Any, ...]] = {
    "activation_offload": (1, 2),
    "amp": ("bf16",),
    "attention": ("efficient", "math"),
    "channels_last": (True,),
    "checkpoint_segments": (1, 2),
    "checkpoint_policy": ("selective",),
    "compile": ("default",),
    "inplace_activations": (True,),
    "loss_chunks": (True,),
    "optimizer_impl": ("for-loop", "foreach", "fused"),
    "optimizer_in_backward": (True,),
    "optimizer_state": ("cpu",),  # few bits: with torchao, in the technique's own tests
    "param_dtype": ("bf16",),
}
# of these `support` is not asked: it offers them on GPUs alone
GPU_ONLY = {"activation_offload", "optimizer_state"}
# settings of GPUs and of the heap; what loads data reaches no gradient, either
NO_GRADIENT_ON_A_CPU = {"matmul_precision", "cudnn_benchmark", "expandable_segments", "keep_heap"}
PARTNERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "checkpointing": {"checkpoint_segments": 2},
    "amp": {"amp": "bf16"},
    "accumulation": {"accumulation_steps": 2},
    "compile": {"compile": "default"},
}
SAMPLES = 8
COSINE = 0.995  # of 8 significant bits in models as small as these


def cases() -> Iterator[Any]:
    """How the optimizer steps meets ordinary gradients, of whatever model is compiled: on one kind often, on the others slow."""
    for name, choices in CHOICES.items():
        for choice, (partner, config), kind in product(choices, PARTNERS.items(), KINDS):
            if name not in config:
                often = partner == "alone" or choice == choices[-1]
                alike = partner == "compile" and name in ("optimizer_impl", "optimizer_state") and kind != "transformer"
                marks = () if often and not alike else (pytest.mark.slow,)
                yield pytest.param(kind, name, choice, partner, id=f"{name}={choice}-{partner}-{kind}", marks=marks)


@cache
def trained(kind: str, partner: str, technique: tuple[tuple[str, Any], ...] = ()) -> tuple[Any, Any, Any, Any]:
    """Gradients of the first step, how far parameters moved in three, buffers after them, and the names."""
    config = {"batch_size": SAMPLES, **PARTNERS[partner], **dict(technique)}
    config["batch_size"] //= config.get("accumulation_steps", 1)
    task = KINDS[kind]()
    torch.manual_seed(0)
    with keep_settings():
        session = prepare(task, config, device="cpu")
        batch = task.batch(SAMPLES)
        parameters = [p for p in session.model.parameters() if p.requires_grad]
        start = torch.cat([p.detach().flatten() for p in parameters])
        gradients = [torch.zeros_like(p) for p in parameters]
        pairs = zip(parameters, gradients, strict=True)
        hooks = [p.register_hook(lambda found, total=total: added(total, found)) for p, total in pairs]
        session.step(batch)
        for hook in hooks:
            hook.remove()
        for _ in range(2):
            session.step(batch)
    movement = torch.cat([p.detach().flatten() for p in parameters]) - start
    return torch.cat([g.flatten() for g in gradients]), movement, list(session.model.buffers()), names(session.model)


def added(total: torch.Tensor, found: torch.Tensor) -> None:
    total += found


def names(model: torch.nn.Module) -> list[Any]:
    return [list(model.state_dict()), [(name, p.shape, p.requires_grad) for name, p in model.named_parameters()]]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating code, which takes minutes."""
    monkeypatch.setattr(techniques_compile, "BACKEND", "aot_eager")


def test_every_technique_that_acts_on_gradients_is_tried() -> None:
    """What trains something else on purpose, or takes several processes, has tests of its own."""
    acting = {t.name for t in TECHNIQUES.values() if t.phase not in (Phase.TASK, Phase.SPREAD, Phase.LOADER)}
    assert acting == CHOICES.keys() | NO_GRADIENT_ON_A_CPU


@pytest.mark.parametrize(("kind", "name", "choice", "partner"), list(cases()))
def test_it_trains_as_without_it(skip_unsupported: Any, kind: str, name: str, choice: Any, partner: str) -> None:
    technique = TECHNIQUES[name]
    if technique.is_redundant(complete({name: choice, **PARTNERS[partner]})):
        pytest.skip("not searched together")
    config = {name: choice, **PARTNERS[partner]}
    skip_unsupported(KINDS[kind](), {key: config[key] for key in config if key not in GPU_ONLY})
    expected = trained(kind, partner)
    gradients, movement, buffers, names = trained(kind, partner, ((name, choice),))
    assert names == expected[3]
    if technique.exact and "amp" not in PARTNERS[partner]:
        assert error(gradients, expected[0]) < 1e-5
        assert error(movement, expected[1]) < 2e-2  # Adam divides by a gradient that may be nothing but rounding
        torch.testing.assert_close(buffers, expected[2], rtol=1e-3, atol=1e-5)
    else:
        assert torch.cosine_similarity(gradients, expected[0], dim=0) > COSINE
