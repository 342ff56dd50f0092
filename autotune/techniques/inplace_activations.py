"""Activation functions that overwrite their input, where no operator of a training pass reads it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from autotune.lazy import torch
from autotune.randomness import keep_randomness
from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch, UnsupportedError
from autotune.techniques.checkpoint_segments import buffers_of, copies_stand_in
from autotune.techniques.frameworks import At, Lines, Unsaid, words

if TYPE_CHECKING:
    from autotune.task import Task

Contexts = Sequence[Callable[[], AbstractContextManager[Any]]]

# Modules whose backward pass in place needs their result only. The others of torch (SiLU, Mish, Hardtanh) keep a copy of
# their input instead, and save nothing (tools/autograd/derivatives.yaml).
_FUNCTIONS = ("ReLU", "LeakyReLU", "ELU", "SELU", "CELU")
_NUM_SAMPLES = 2
_NUM_PASSES = 5  # they miss a branch that a third of all passes take in 13 % of cases


class InplaceActivations(Switch):
    """`inplace = True` while a module trains, module by module.

    A module whose input is read later would make training silently wrong, or an error. So each config finds out by
    itself, in a few passes of two samples with its other techniques, which inputs are used again. Those passes change
    neither buffers nor random states. One pass of fake tensors finds the same modules. Evaluation, and whatever runs without
    gradients, overwrites nothing.

    Only what those passes do is seen. A branch that training takes too seldom to be among them, a forward hook that is
    added later, and a read that is no operator of torch (`h.detach().numpy()`) may find an input overwritten.
    """

    name = "inplace_activations"
    summary = "activation functions overwrite their input where it is not needed again: less memory"
    applies = "modules `ReLU`, `LeakyReLU`, `ELU`, `SELU`, `CELU`, each where training passes show it safe"
    phase = Phase.MODEL
    # What is recomputed, and so reads its input again, is known then. What waits in host memory is not moved yet: the
    # backward pass would read the copy, and the tensor, which is still being copied, would seem free to be overwritten.
    order = 38
    leanest = (True,)
    # Less memory in nearly the same time. `ReLU` needs its result only, in place or not; of the others one tensor less is kept.
    expected = Expectation(compute=Factor(spread=1.02), activations=Factor(typical=0.92, spread=1.15))
    keeps_random_masks = True
    frameworks = words(loop=Unsaid(), torch=Lines({At.MODEL: "overwrite_inputs(model, {places})"}))

    def conflict(self, config: Config) -> str:
        return "the compiler decides what is overwritten" if config["compile"] != "off" else ""

    def why_not(self, setting: Setting) -> str:
        """It applies where at least one module may overwrite its input, and training so raises no error."""
        safe = _safe(setting.task, setting.model, [setting.fresh_batch() for _ in range(_NUM_PASSES)])
        if not safe:
            return _why_none(setting.model)
        try:
            for module in safe:
                module.inplace = True
            _train(setting.task, setting.model, setting.fresh_batch())
        finally:
            for module in safe:
                module.inplace = False
        return ""

    def apply(self, build: Build, choice: Choice) -> None:
        """Switch the safe modules on."""
        with keep_randomness(build.device.torch_device):
            try:
                safe = _safe_in(build, min(_NUM_SAMPLES, build.config.batch_size))
            except Exception:  # so few samples may be an error
                safe = _safe_in(build, build.config.batch_size)
        if not safe:
            raise UnsupportedError(f"inplace_activations: {_why_none(build.model)}")
        overwrite_inputs(build.model, **build.acting_on(self.name, safe))


def overwrite_inputs(model: torch.nn.Module, modules: Sequence[str]) -> None:
    """Switch modules on, by their names."""
    for name in modules:
        module: Any = model.get_submodule(name)
        module.inplace = True
        module.register_forward_pre_hook(_only_in_training)


def _candidates(model: torch.nn.Module) -> list[Any]:
    from torch import nn

    kinds = [getattr(nn, name) for name in _FUNCTIONS]
    return [m for m in model.modules() if type(m) in kinds and not m.inplace and "forward" not in vars(m)]


def _only_in_training(module: Any, args: Any) -> None:
    """Before a call. Evaluation may use the input again, and has nothing to save."""
    module.inplace = module.training and torch.is_grad_enabled()


def _why_none(model: torch.nn.Module) -> str:
    if _candidates(model):
        return "the input of each activation function is needed after it"
    return f"no module of the model is one of {', '.join(_FUNCTIONS)} and out of place"


def _safe_in(build: Build, num_samples: int) -> list[Any]:
    from torch._guards import detect_fake_mode
    from torch.utils._python_dispatch import _disable_current_modes

    from autotune.task.batches import to_device

    num_passes = 1 if detect_fake_mode() else _NUM_PASSES  # what torch draws at random steers no fake tensor's way
    with _disable_current_modes():  # a batch is made for real, also where the model is traced on fake tensors
        batches = [build.task.small_batch(num_samples) for _ in range(num_passes)]
    batches = [to_device(batch, build.device.torch_device) for batch in batches]
    for transform in build.batch_transforms:
        batches = [transform(batch) for batch in batches]
    return _safe(build.task, build.model, batches, build.forward_contexts)


def _safe(task: Task, model: torch.nn.Module, batches: Sequence[Any], contexts: Contexts = ()) -> list[Any]:
    """The modules that may overwrite their input, by what training passes of `batches` do, each with its own random draws."""
    from autotune.techniques.tensors.overwriting import find_overwritable

    def train() -> None:
        for batch in batches:
            _train(task, model, batch, contexts)

    if not (candidates := _candidates(model)):
        return []
    with copies_stand_in(buffers_of((model,))):
        return find_overwritable(candidates, train)


def _train(task: Task, model: torch.nn.Module, batch: Any, contexts: Contexts = ()) -> None:
    """Forward and backward pass; without gradients, as where memory is short, forward alone."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        loss = task.loss(model, batch)
    if loss.requires_grad:
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
