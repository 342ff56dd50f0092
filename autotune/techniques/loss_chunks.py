"""The scores of a large vocabulary are computed a few rows at a time, together with their loss and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Switch
from autotune.techniques.build import Forward
from autotune.techniques.frameworks import At, Lines, words

if TYPE_CHECKING:
    from autotune.techniques.tensors.scores import Use

_FEWEST_CLASSES = 4096  # with fewer, the scores are no large part of what a model keeps


class LossChunks(Switch):
    """A large last layer returns scores that are not computed until `cross_entropy` needs them, and then in pieces.

    Each piece's gradient is computed together with its loss, so that nothing is computed twice and no piece is kept.
    """

    name = "loss_chunks"
    summary = "scores of a large vocabulary in pieces, gradient included: never held as a whole"
    applies = (
        "`Linear` layers of 4096 outputs or more straight into `cross_entropy`; "
        "on GPUs (CPUs: if memory is short or if included)"
    )
    phase = Phase.MODEL
    order = 50
    untraced = "a loss that is computed in pieces is not traced"
    leanest = (True,)
    # The scores, their logarithms and their gradient are a large part of what a language model holds.
    expected = Expectation(compute=Factor(spread=1.1), activations=Factor(typical=0.6, spread=1.6))
    keeps_random_masks = True
    traced_in_whole_steps = True
    against_shortage = True
    likely = (True,)
    frameworks = words(
        torch=Lines(
            {
                At.MODEL: "put_back_other_layers = compute_scores_in_pieces(model, {places})",
                At.BATCH: "batch = put_back_other_layers(batch)",
            }
        )
    )

    def conflict(self, config: Config) -> str:
        if config["amp"] == "fp16":
            return "the gradient is computed before the gradient scaler scales the loss, and would underflow"
        return "it cannot be compiled: the scores are never there as a whole" if config["compile"] != "off" else ""

    def why_not(self, setting: Setting) -> str:
        """It applies where `cross_entropy` takes the scores of such a layer directly, at most cut or reshaped."""
        if not (heads := _heads(setting.model)):
            return f"no Linear layer has {_FEWEST_CLASSES} outputs or more"
        try:
            uses = _replace(heads)
            setting.task.loss(setting.model, setting.fresh_batch())
        finally:
            for head in heads:
                del head.forward
        return "" if any(use.losses for use in uses) else "the scores do not go straight into torch's cross_entropy"

    def why_optional(self, setting: Setting) -> str:
        return "" if setting.device.capabilities.saving_pays else "on a CPU it saves memory, and no time"

    def apply(self, build: Build, choice: Choice) -> None:
        """Replace the forward of the large layers. A layer whose scores the model needs as a whole gets its forward back."""
        places = build.acting_on(self.name, _heads(build.model))
        build.batch_transforms.append(compute_scores_in_pieces(build.model, **places))


def _heads(model: torch.nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if type(module) is torch.nn.Linear and module.out_features >= _FEWEST_CLASSES and "forward" not in vars(module)
    ]


def compute_scores_in_pieces(model: torch.nn.Module, modules: Sequence[str]) -> Callable[[Any], Any]:
    """Replace the forward of layers, by their names.

    The returned function is called with every micro batch, and returns it. It restores the forward of layers whose scores were needed
    as a whole. It does so between two micro batches, because a recomputation must repeat the first pass.
    """
    heads = [model.get_submodule(name) for name in modules]
    uses = _replace(heads)

    def put_back(batch: Any) -> Any:
        for head, use in zip(heads, uses, strict=True):
            if use.computed and not use.losses and "forward" in vars(head):
                del head.forward
        return batch

    return put_back


def _replace(heads: Sequence[Any]) -> list[Use]:
    from autotune.techniques.tensors.scores import Use

    uses = [Use() for _ in heads]
    for head, use in zip(heads, uses, strict=True):
        head.forward = _InPieces(head, use)
    return uses


@dataclass(eq=False)
class _InPieces(Forward):
    use: Use

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # named as in `nn.Linear.forward`
        from autotune.techniques.tensors.scores import Scores

        layer: Any = self.module
        return Scores.of(input, layer.weight, layer.bias, self.use) if self.trains() else self.call(input)
