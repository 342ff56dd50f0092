"""How the optimizer's update is carried out: parameter by parameter, in lists of tensors, or in one fused kernel."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from autotune.errors import first_line
from autotune.lazy import torch
from autotune.records.config import Choice
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Support, Technique, UnsupportedError
from autotune.techniques.frameworks import At, Lines, Table, Unsaid, words

_FLAGS = {
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
# Attributes that the constructors of fused optimizers set besides the flags; GradScaler and the first step read them.
_FUSED_MARKS = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")


class OptimizerImpl(Technique):
    """The `foreach` and `fused` flags of torch's own optimizers."""

    name = "optimizer_impl"
    summary = "the update in one kernel, in tensor lists, or one parameter at a time"
    choices = ("default", *_FLAGS)
    applies = "torch's own optimizers"
    off = "default"
    phase = Phase.OPTIMIZER
    order = 10
    keeps_random_masks = True
    check_steps = 3  # the first step of many optimizers depends on nothing but the gradient's sign
    likely = ("fused", "foreach")
    # TrainingArguments name optimizer and implementation in one word.
    said_of = "AdamW"
    frameworks = words(
        transformers=Table({"default": {}, "fused": {"optim": "adamw_torch_fused"}}),
        loop=Unsaid(),
        torch=Lines({At.OPTIMIZER: "implement(optimizer, {choice})"}),
    )

    def label(self, choice: Choice) -> str:
        return f"{choice} optimizer" if choice == self.off else str(choice)

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """One kernel is faster than lists of tensors, and lists are faster than a loop. Lists take memory for their results."""
        typical = {"fused": 0.6, "foreach": 0.8, "for-loop": 1.2}.get(str(choice), 1.0)
        return Expectation(
            compute=Factor(typical=0.99, spread=1.03),
            update=Factor(typical=typical, spread=1.4),
            state=Factor(spread=1.15),
        )

    def support(self, setting: Setting) -> Support:
        """The implementations that work on the parameters of `setting.optimizer`, without the one that it uses already."""
        optimizer = setting.optimizer
        if reason := _why_not(optimizer):
            return Support(choices=(self.off,), reason=reason)
        current = current_implementation(optimizer, foreach=setting.device.capabilities.foreach)
        refused = {name: _refusal(optimizer, name) for name in _FLAGS if name != current}
        if any(getattr(module, "sparse", False) is True for module in setting.model.modules()):
            refused["fused"] = "fused optimizers take no sparse gradients, which an embedding of the model makes"
        return Support(
            choices=(self.off, *(name for name, why in refused.items() if not why)),
            reason="; ".join(f"{name}: {why}" for name, why in refused.items() if why),
        )

    def apply(self, build: Build, choice: Choice) -> None:
        """Give the task's optimizer the implementation; parameter groups, hooks and the object itself stay."""
        if reason := _why_not(build.optimizer) or _refusal(build.optimizer, str(choice)):
            raise UnsupportedError(f"optimizer_impl={choice}: {reason}")
        implement(build.optimizer, str(choice))


def implement(optimizer: torch.optim.Optimizer, implementation: str) -> None:
    """Give one of torch's own optimizers, before its first step, another implementation.

    A second optimizer is built so that the class itself validates the flags and creates what depends on them (Adagrad's
    initial state, `_FUSED_MARKS`); its parts then move into the first.
    """
    fresh = _build(optimizer, optimizer.param_groups, implementation)
    for group, fresh_group in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        group.update(fresh_group)
    optimizer.defaults.update(fresh.defaults)
    optimizer.state = fresh.state
    for mark in _FUSED_MARKS:
        vars(optimizer).pop(mark, None)
        if hasattr(fresh, mark):
            setattr(optimizer, mark, getattr(fresh, mark))


def current_implementation(optimizer: torch.optim.Optimizer, *, foreach: bool) -> str:
    """The implementation of the user's optimizer: by its flags, else foreach where that is the device's default, else for-loop."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if group["foreach"] is not None:
        return "foreach" if group["foreach"] else "for-loop"
    return "foreach" if foreach and group.get("fused") is None and not _loops_by_default(optimizer) else "for-loop"


def _loops_by_default(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch updates parameter by parameter on every device, unless it is told otherwise."""
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        group = optimizer.param_groups[0]
        return isinstance(group["lr"], torch.Tensor) and not group["capturable"]
    return isinstance(optimizer, torch.optim.Adafactor)


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is not kind or "foreach" not in optimizer.defaults:
        return f"{kind.__name__} is not an optimizer of torch.optim with several implementations"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "a differentiable optimizer has one implementation"
    if optimizer.state and not _build(optimizer, optimizer.param_groups, "for-loop").state:
        return "the optimizer already has state, which belongs to its present implementation"
    return ""


def _refusal(optimizer: torch.optim.Optimizer, implementation: str) -> str:
    """Why the implementation does not work, found by taking a step on one-element stand-ins; empty when it does."""
    if implementation == "fused" and "fused" not in optimizer.defaults:
        return f"{type(optimizer).__name__} has no fused implementation"
    groups = []
    for group in optimizer.param_groups:
        kinds = sorted({(p.device, p.dtype) for p in group["params"]}, key=str)
        stand_ins = [torch.ones(1, device=device, dtype=dtype, requires_grad=True) for device, dtype in kinds]
        for stand_in in stand_ins:
            stand_in.grad = torch.ones_like(stand_in)
        groups.append({**group, "params": stand_ins})
    try:
        _build(optimizer, groups, implementation).step()
    except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
        return first_line(error)
    return ""


def _build(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], implementation: str
) -> torch.optim.Optimizer:
    """An optimizer of the same class and defaults over `groups`, with the implementation's flags."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    flags = {flag: value for flag, value in _FLAGS[implementation].items() if flag in accepted}
    defaults = {key: value for key, value in {**optimizer.defaults, **flags}.items() if key in accepted}
    return type(optimizer)([{**group, **flags} for group in groups], **defaults)
