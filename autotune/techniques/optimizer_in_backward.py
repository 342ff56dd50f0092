"""Each parameter is updated as soon as its gradient is there, so that gradients are never held all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.records.config import Choice, Config, World
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch, UnsupportedError
from autotune.techniques.frameworks import At, Lines, words

if TYPE_CHECKING:
    import torch

    from autotune.task import Task


class OptimizerInBackward(Switch):
    """`register_post_accumulate_grad_hook` on each parameter, which runs the task's own optimizer on that parameter alone.

    Optimizer object, parameter groups (whose learning rate a scheduler sets) and state stay as they are. The step after
    the backward pass then finds no gradients and does nothing.
    """

    name = "optimizer_in_backward"
    summary = "parameters are updated during the backward pass: gradients are not held, more small kernels"
    applies = (
        "torch's own optimizers, without accumulation, fp16 or gradient clipping; "
        "on GPUs (CPUs: if memory is short or if included)"
    )
    phase = Phase.OPTIMIZER
    order = 20
    untraced = "gradients that are freed in the backward pass are not traced"
    leanest = (True,)
    # Gradients are a quarter of an Adam model's state; the update takes as many kernels as there are parameters.
    expected = Expectation(
        compute=Factor(spread=1.03),
        update=Factor(typical=1.2, spread=1.6),
        state=Factor(typical=0.8, spread=1.1),
    )
    keeps_random_masks = True
    check_steps = 3
    traced_in_whole_steps = True
    against_shortage = True
    frameworks = words(torch=Lines({At.OPTIMIZER: "update_in_backward(optimizer)"}))

    def conflict(self, config: Config) -> str:
        if config.accumulation_steps > 1:
            return "gradients that accumulate over several micro batches must be kept"
        return "the gradient scaler looks at all gradients before the update" if config["amp"] == "fp16" else ""

    def why_not(self, setting: Setting) -> str:
        return _why_not(setting.task, setting.optimizer) or _why_not_in(setting.world)

    def why_optional(self, setting: Setting) -> str:
        saving_pays = setting.device.capabilities.saving_pays
        return "" if saving_pays else "on a CPU activations are nearly always more than the gradients that it saves"

    def apply(self, build: Build, choice: Choice) -> None:
        """Hook the update to the parameters that the optimizer has."""
        if reason := _why_not(build.task, build.optimizer) or _why_not_in(build.world):
            raise UnsupportedError(f"optimizer_in_backward: {reason}")
        build.one_micro_batch = "optimizer_in_backward updates the parameters in each backward pass"
        update_in_backward(build.optimizer)


def update_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer on each parameter as soon as its gradient is there, and drop the gradient; a later step then finds none."""
    group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def update(parameter: torch.Tensor) -> None:
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[group_of[parameter]], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    for parameter in group_of:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(update)


def _why_not_in(world: World) -> str:
    return "" if world.size == 1 else "gradients are put together over the processes after the backward pass"


def _why_not(task: Task, optimizer: torch.optim.Optimizer) -> str:
    """Why not: an optimizer must update each parameter by itself, and nothing may need all gradients."""
    from autotune.techniques.tensors.copies import why_not_apart

    if reason := why_not_apart(optimizer):
        return reason
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "hooks of the optimizer's steps would run once for each parameter"
    if task.max_grad_norm is not None:
        return "clipping by the norm of all gradients needs all of them at once"
    return ""
