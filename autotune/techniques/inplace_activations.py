"""Activation functions that overwrite their input, where nobody needs it any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.devices.randomness import restored_randomness
from autotune.records.config import Choice, Config
from autotune.records.inspection import Support
from autotune.techniques.base import Phase, Technique, UnsupportedError
from autotune.techniques.build import Build, Setting
from autotune.techniques.expectation import Expectation, Factor
from autotune.techniques.recomputed import buffers_of, copies_stand_in

if TYPE_CHECKING:
    import torch

    from autotune.task import Task

# Modules whose backward pass in place needs their result only. The others of torch (SiLU, Mish, Hardtanh) keep a copy of
# their input instead, and save nothing (tools/autograd/derivatives.yaml).
_FUNCTIONS = ("ReLU", "LeakyReLU", "ELU", "SELU", "CELU")
_NUM_SAMPLES = 2
_NEEDED = "the input of each activation function is needed after it"


class InplaceActivations(Technique):
    """`inplace = True`, module by module.

    A module whose input somebody needs later would make training silently wrong, or an error. So each config finds out by
    itself, in one pass of two samples with all its other techniques, which inputs are used again. That pass changes
    neither buffers nor random states, and finds the same modules on fake tensors.
    """

    name: ClassVar[str] = "inplace_activations"
    summary: ClassVar[str] = "activation functions overwrite their input where it is not needed again: less memory"
    listed_choices: ClassVar[str] = "`false` `true`"
    applies: ClassVar[str] = (
        "modules `ReLU`, `LeakyReLU`, `ELU`, `SELU`, `CELU`, each where a training pass shows it safe"
    )
    off: ClassVar[Choice] = False
    phase: ClassVar[Phase] = Phase.MODEL
    order: ClassVar[int] = 45  # what is recomputed, and so reads its input again, is known then
    keeps_random_masks: ClassVar[bool] = True
    likely: ClassVar[tuple[Choice, ...]] = (True,)

    def support(self, setting: Setting) -> Support:
        """It applies where at least one module may overwrite its input, and training so raises no error."""
        if not _candidates(setting.model):
            names = ", ".join(_FUNCTIONS)
            return Support(choices=(False,), reason=f"no module of the model is one of {names} and out of place")
        safe = _safe(setting.task, setting.model, setting.fresh_batch())
        if not safe:
            return Support(choices=(False,), reason=_NEEDED)
        try:
            _switch(safe, True)
            _train(setting.task, setting.model, setting.fresh_batch())
        finally:
            _switch(safe, False)
        return Support(choices=(False, True))

    def apply(self, build: Build, choice: Choice) -> None:
        """Switch the safe modules on."""
        if reason := _why_not_beside(build.config):
            raise UnsupportedError(f"inplace_activations: {reason}")
        with restored_randomness(build.device.torch_device):
            try:
                safe = _safe_in(build, min(_NUM_SAMPLES, build.config.batch_size))
            except Exception:  # so few samples may be an error
                safe = _safe_in(build, build.config.batch_size)
        if not safe:
            raise UnsupportedError(f"inplace_activations: {_NEEDED}")
        _switch(safe, True)

    def is_redundant(self, config: Config) -> bool:
        """It is not combined with a compiler."""
        return bool(_why_not_beside(config))

    def least_memory(self, choices: Sequence[Choice]) -> Choice | None:
        """Switched on."""
        return True if True in choices else None

    def expectation(self, choice: Choice, choices: Sequence[Choice]) -> Expectation:
        """`ReLU` needs its result only, in place or not; of the others one tensor less is kept."""
        return Expectation(compute=Factor(typical=0.98, spread=1.05), activations=Factor(typical=0.92, spread=1.15))


def _candidates(model: torch.nn.Module) -> list[Any]:
    from torch import nn

    kinds = [getattr(nn, name) for name in _FUNCTIONS]
    return [m for m in model.modules() if type(m) in kinds and not m.inplace and "forward" not in vars(m)]


def _switch(modules: Sequence[Any], on: bool) -> None:
    for module in modules:
        module.inplace = on


def _safe_in(build: Build, num_samples: int) -> list[Any]:
    from torch.utils._python_dispatch import _disable_current_modes

    from autotune.task.batches import to_device

    with _disable_current_modes():  # a batch is made for real, also where the model is traced on fake tensors
        batch = build.task.small_batch(num_samples)
    batch = to_device(batch, build.device.torch_device)
    for transform in build.batch_transforms:
        batch = transform(batch)
    return _safe(build.task, build.model, batch, build.forward_contexts)


def _safe(
    task: Task,
    model: torch.nn.Module,
    batch: Any,
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
) -> list[Any]:
    """The modules that may overwrite their input, by what a training pass of `batch` does."""
    from autotune.techniques.tensors.overwriting import overwritable

    with copies_stand_in(buffers_of((model,))):
        return overwritable(_candidates(model), lambda: _train(task, model, batch, contexts))


def _train(
    task: Task,
    model: torch.nn.Module,
    batch: Any,
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
) -> None:
    """Forward and backward pass; without gradients, as where memory is short, forward alone."""
    import torch

    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        loss = task.loss(model, batch)
    if loss.requires_grad:
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _why_not_beside(config: Config) -> str:
    return "the compiler decides what is overwritten" if config["compile"] != "off" else ""
