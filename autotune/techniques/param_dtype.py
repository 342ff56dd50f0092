"""Parameters in bf16 without losing small updates, or matrix products in fp8."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.records.device import BF16, FP32
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Support, Technique, UnsupportedError
from autotune.techniques.frameworks import At, Table, words
from autotune.techniques.optimizer_state import TORCHAO_MISSING, torchao

_FP8_CAPABILITY = (8, 9)
_FP8_MULTIPLE = 16  # torch._scaled_mm takes matrices whose sides are multiples of this
_AUTOCAST = "torch.autocast(DEVICE.type, torch.bfloat16)"
EMULATED = False  # whether values are only rounded to fp8 and computed in another type, which works on any device


class ParamDtype(Technique):
    """Weights and their gradients in bf16, updated in fp32; or fp32 weights whose linear layers compute in fp8.

    Both run under autocast to bf16, so that tensors which the model makes in fp32 fit to them. Modules that have only vectors stay
    in fp32 (normalisations and their statistics, scales), and so do embeddings with sparse gradients, which update few rows.
    The names of parameters do not change. With `bf16`, a checkpoint of the model has its weights in bf16.
    """

    name = "param_dtype"
    summary = "weights and gradients in bf16, updated in fp32 (14 bytes a parameter with Adam, not 16); matrix products in fp8"
    choices = ("fp32", "bf16", "fp8")
    applies = (
        "if included, in place of `amp`; `bf16`: torch's own optimizers; `fp8`: torchao (extra `lean`), capability 8.9"
    )
    off = "fp32"
    phase = Phase.OPTIMIZER
    order = 5  # before other techniques hook something to the parameters
    untraced = "parameters that change their type after the optimizer is built are not traced"
    leanest = ("bf16",)
    exact = False
    likely = ("bf16",)
    frameworks = words(
        accelerate=Table({"fp8": {"mixed_precision": "fp8"}}),
        torch=Table(
            {
                "bf16": {At.FORWARD: _AUTOCAST, At.OPTIMIZER: "keep_weights_in_bf16(model, optimizer)"},
                "fp8": {At.FORWARD: _AUTOCAST, At.OPTIMIZER: "compute_in_fp8(model)"},
            }
        ),
    )

    def conflict(self, config: Config) -> str:
        return "it computes in bf16 already: leave amp off" if config["amp"] != "off" else ""

    def label(self, choice: Choice) -> str:
        return f"{choice} matrix products" if choice == "fp8" else f"{choice} parameters"

    def arithmetic(self, choice: Choice) -> str:
        """bf16, also for fp8, where everything but linear layers computes in bf16."""
        return FP32 if choice == self.off else BF16

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """As with autocast, but without a second copy of the weights; the update converts them portion by portion."""
        fp8 = choice == "fp8"
        return Expectation(
            compute=Factor(typical=0.6 if fp8 else 0.7, spread=1.6 if fp8 else 1.4),
            launch=Factor(typical=1.8 if fp8 else 1.2, spread=2.5),
            update=Factor(typical=1.0 if fp8 else 1.4, spread=1.05 if fp8 else 1.6),
            state=Factor(typical=1.0 if fp8 else 0.87, spread=1.1),
            activations=Factor(typical=0.7, spread=1.3),
            untraced=Factor(spread=2.0),
        )

    def support(self, setting: Setting) -> Support:
        """The choices that optimizer and device allow, only if included. Nothing is tried: emulated types could take minutes."""
        refused = {choice: why for choice in ("bf16", "fp8") if (why := _why_not(choice, setting))}
        reasons = [f"{choice}: {why}" for choice, why in refused.items()]
        if len(refused) < len(self.choices) - 1:
            reasons.insert(0, "gradients have 8 significant bits, also where they are added up")
        return Support(
            choices=(self.off,),
            optional=tuple(choice for choice in self.choices[1:] if choice not in refused),
            reason="; ".join(reasons),
            note="compare validation results before you use it; outside session.step, call the model under "
            "torch.autocast to bf16",
        )

    def apply(self, build: Build, choice: Choice) -> None:
        if reason := _why_not(choice, build):
            raise UnsupportedError(f"param_dtype={choice}: {reason}")
        kind = build.device.torch_device.type  # the CPU stands in for a GPU that is not in this machine
        build.forward_contexts.append(partial(torch.autocast, kind, torch.bfloat16))
        if choice == "fp8":
            compute_in_fp8(build.model)
        else:
            keep_weights_in_bf16(build.model, build.optimizer)


def keep_weights_in_bf16(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Convert the weights to bf16, and let the optimizer step on their values in fp32."""
    from autotune.techniques.tensors.copies import CopySteps, take_steps_by

    for parameter in _weights(model):
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.grad = None
    take_steps_by(optimizer, CopySteps())


def _weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The fp32 parameters of modules that have a matrix, without those with sparse gradients."""
    found: dict[torch.nn.Parameter, None] = {}
    sparse: set[torch.nn.Parameter] = set()
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.dtype is torch.float32]
        if getattr(module, "sparse", False) is True:
            sparse.update(own)
        elif any(p.dim() > 1 for p in own):
            found.update(dict.fromkeys(own))
    return [p for p in found if p not in sparse]


def _linear_layers(model: torch.nn.Module) -> list[Any]:
    plain = [m for m in model.modules() if type(m) is torch.nn.Linear and "forward" not in vars(m)]
    return [
        layer for layer in plain if not layer.in_features % _FP8_MULTIPLE and not layer.out_features % _FP8_MULTIPLE
    ]


def compute_in_fp8(model: torch.nn.Module) -> None:
    """Replace the forward of linear layers by that of torchao's layer, which computes with the same parameters."""
    config = torchao("float8").Float8LinearConfig(emulate=EMULATED, pad_inner_dim=True)
    in_fp8 = torchao("float8.float8_linear").Float8Linear
    for layer in _linear_layers(model):
        layer.forward = in_fp8.from_float(layer, config=config).forward


def _why_not(choice: Choice, of: Setting | Build) -> str:
    from autotune.techniques.tensors.copies import why_not_apart

    if choice == "bf16":
        if of.world.size > 1:
            return "its copies in bf16 take the gradients before they are put together over the processes"
        return why_not_apart(of.optimizer) if _weights(of.model) else "the model has no matrix in fp32"
    capability = of.device.info().capability
    if capability < _FP8_CAPABILITY and not EMULATED:
        found = f"this GPU has {capability[0]}.{capability[1]}" if any(capability) else "this is a CPU"
        return f"products in fp8 need a GPU of compute capability 8.9, {found}"
    if not _linear_layers(of.model):
        return f"no Linear layer has numbers of inputs and outputs that are multiples of {_FP8_MULTIPLE}"
    return TORCHAO_MISSING if find_spec("torchao") is None else ""
