"""Activation functions that overwrite their input, where no operator of a training pass reads it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from autotune.lazy import torch
from autotune.randomness import keep_randomness
from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch, UnsupportedError
from autotune.techniques.build import FEW
from autotune.techniques.checkpoint_segments import buffers_of, copies_stand_in
from autotune.techniques.frameworks import At, Lines, Unsaid, words
from autotune.units import MIB

if TYPE_CHECKING:
    from autotune.task import Task

Contexts = Sequence[Callable[[], AbstractContextManager[Any]]]

# Modules whose backward pass, when in place, needs only their result. torch's others (SiLU, Mish, Hardtanh) keep a copy of
# their input instead, and save nothing (tools/autograd/derivatives.yaml).
_FUNCTIONS = ("ReLU", "LeakyReLU", "ELU", "SELU", "CELU")
_NUM_PASSES = 5  # a branch that a third of all passes take is missed with a probability of 13 %
# What oneDNN keeps for the shapes of those passes, beside what it keeps for a type: 10 to 19 MiB in bf16, 1 to 8 MiB in fp32, with eight
# linear layers
PASSES_BYTES = 12 * MIB


class InplaceActivations(Switch):
    """`inplace = True` while a module trains, module by module.

    If a module overwrote an input that is read later, training would be silently wrong, or fail. So each config finds out for
    itself, in a few passes of two samples with its other techniques, which inputs are used again. These passes change
    neither buffers nor random states. Of fake tensors one pass is enough: there are no values for a branch to depend on.
    Evaluation, and whatever runs without gradients, overwrites nothing.

    Only what these passes do is seen. A branch that training takes too seldom to occur in them, a forward hook that is
    added later, and a read that is no operator of torch (`h.detach().numpy()`) may find an input overwritten.
    """

    name = "inplace_activations"
    summary = "activation functions overwrite their input where it is not needed again: less memory"
    applies = "modules `ReLU`, `LeakyReLU`, `ELU`, `SELU`, `CELU`, each where training passes show it safe"
    phase = Phase.MODEL
    # After the techniques that recompute blocks, since a recomputed block reads its input again. Before activation_offload: else
    # the backward pass would read the copy, and the tensor would seem free to be overwritten while it is still being copied.
    order = 38
    leanest = (True,)
    # Less memory in nearly the same time. `ReLU` keeps only its result even out of place; in place, the others keep one tensor fewer.
    expected = Expectation(compute=Factor(spread=1.02), activations=Factor(typical=0.92, spread=1.15))
    keeps_random_masks = True
    frameworks = words(loop=Unsaid(), torch=Lines({At.MODEL: "overwrite_inputs(model, {places})"}))

    def conflict(self, config: Config) -> str:
        return "the compiler decides what is overwritten" if config["compile"] != "off" else ""

    def untraced_bytes(self, choice: Choice) -> int:
        return PASSES_BYTES if choice else 0

    def why_not(self, setting: Setting) -> str:
        """It applies where at least one module may overwrite its input, and a training pass that does so raises no error."""
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
        """Let the safe modules overwrite their input."""
        with keep_randomness(build.device.torch_device):
            try:
                safe = _safe_in(build, min(FEW, build.config.batch_size))
            except Exception:  # user code may fail with so few samples
                safe = _safe_in(build, build.config.batch_size)
        if not safe:
            raise UnsupportedError(f"inplace_activations: {_why_none(build.model)}")
        overwrite_inputs(build.model, **build.acting_on(self.name, safe))


def overwrite_inputs(model: torch.nn.Module, modules: Sequence[str]) -> None:
    """Let modules, by their names, overwrite their input while they train."""
    for name in modules:
        module: Any = model.get_submodule(name)
        module.inplace = True
        module.register_forward_pre_hook(_only_in_training)


def _candidates(model: torch.nn.Module) -> list[Any]:
    from torch import nn

    kinds = [getattr(nn, name) for name in _FUNCTIONS]
    return [m for m in model.modules() if type(m) in kinds and not m.inplace and "forward" not in vars(m)]


def _only_in_training(module: Any, args: Any) -> None:
    """A hook before each call: evaluation may use the input again, and has no memory to save."""
    module.inplace = module.training and torch.is_grad_enabled()


def _why_none(model: torch.nn.Module) -> str:
    if _candidates(model):
        return "the input of each activation function is needed after it"
    return f"the model has no {', '.join(_FUNCTIONS)} that is out of place"


def _safe_in(build: Build, num_samples: int) -> list[Any]:
    from torch._guards import detect_fake_mode
    from torch.utils._python_dispatch import _disable_current_modes

    from autotune.task.batches import to_device

    num_passes = 1 if detect_fake_mode() else _NUM_PASSES  # on fake tensors random draws cannot choose a branch
    with _disable_current_modes():  # batches are real, even where the model is traced on fake tensors
        batches = [build.task.small_batch(num_samples) for _ in range(num_passes)]
    batches = [to_device(batch, build.device.torch_device) for batch in batches]
    for transform in build.batch_transforms:
        batches = [transform(batch) for batch in batches]
    return _safe(build.task, build.model, batches, build.forward_contexts)


def _safe(task: Task, model: torch.nn.Module, batches: Sequence[Any], contexts: Contexts = ()) -> list[Any]:
    """The modules that may overwrite their input, as seen in a training pass for each of `batches`, with its own random draws."""
    from autotune.techniques.tensors.overwriting import find_overwritable

    def train() -> None:
        for batch in batches:
            _train(task, model, batch, contexts)

    if not (candidates := _candidates(model)):
        return []
    with copies_stand_in(buffers_of((model,))):
        return find_overwritable(candidates, train)


def _train(task: Task, model: torch.nn.Module, batch: Any, contexts: Contexts = ()) -> None:
    """Run a forward and a backward pass; only the forward pass where the loss has no gradient."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        loss = task.loss(model, batch)
    if loss.requires_grad:
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
