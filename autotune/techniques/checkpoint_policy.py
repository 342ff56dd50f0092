"""What recomputed blocks keep from their first pass: only their input, or also results that are costly to compute again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.lazy import torch
from autotune.records.config import Choice, Config
from autotune.techniques import Build, Expectation, Factor, Phase, Setting, Technique
from autotune.techniques.block_chains import blocks_of
from autotune.techniques.checkpoint_segments import CheckpointSegments, Contexts, Recomputed
from autotune.techniques.frameworks import At, Lines, Unsaid, words

# operators of torch.ops.aten; each device has some of them
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


class CheckpointPolicy(Technique):
    """`create_selective_checkpoint_contexts` around each recomputed block."""

    name = "checkpoint_policy"
    summary = "recomputed blocks keep matrix products and attention: less computing, more memory"
    choices = ("full", "selective")
    applies = "with `checkpoint_segments`, on GPUs (CPUs: if included)"
    off = "full"
    phase = Phase.MODEL
    order = 35  # after checkpoint_segments, which decides what is recomputed
    untraced = "what a recomputed block keeps in part is not traced"
    # Matrix products are most of a forward pass's work, and about half of what it keeps.
    expected = Expectation(
        compute=Factor(typical=0.87, spread=1.08),
        launch=Factor(spread=1.1),
        activations=Factor(typical=1.5, spread=1.4),
    )
    keeps_random_masks = True
    frameworks = words(loop=Unsaid(), torch=Lines({At.MODEL: "keep_costly_results(model)"}))

    def label(self, choice: Choice) -> str:
        return f"{choice} checkpointing"

    def is_redundant(self, config: Config) -> bool:
        """The technique does nothing where nothing is recomputed."""
        return config["checkpoint_segments"] == 0

    def why_not(self, setting: Setting) -> str:
        """Tries a step with every block recomputed. It raises where a block changes a kept result in place, for example."""
        model = setting.model
        num_blocks = len(blocks_of(setting.task, model).blocks)
        if self.why_optional(setting):
            return ""
        forwards = {module: vars(module).get("forward") for module in model.modules()}
        build = Build(task=setting.task, device=setting.device, config=Config(tuple(setting.baseline.items())))
        build.model = model
        try:
            CheckpointSegments().apply(build, num_blocks)
            keep_costly_results(model)
            torch.autograd.backward(setting.task.loss(model, setting.fresh_batch()))
        finally:
            for module, forward in forwards.items():
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward
            model.zero_grad(set_to_none=True)
        return ""

    def why_optional(self, setting: Setting) -> str:
        saving_pays = setting.device.capabilities.saving_pays
        return "" if saving_pays else "fewer checkpoint segments give about the same on a CPU"

    def apply(self, build: Build, choice: Choice) -> None:
        keep_costly_results(build.model)


def keep_costly_results(model: torch.nn.Module) -> None:
    """Let every recomputed block of a model keep the results of matrix products and attention."""
    for module in model.modules():
        if isinstance(recomputed := vars(module).get("forward"), Recomputed):
            recomputed.keep = _contexts


def _contexts() -> Contexts:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-any-return]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep products, and attention without dropout.

    An operator that draws random numbers runs again. If its result were kept, later operators would draw other numbers than
    in the first pass.
    """
    from torch.utils.checkpoint import CheckpointPolicy as Policy

    name = operator.name().removeprefix("aten::").partition(".")[0]
    kept = name in _PRODUCTS or (name in _ATTENTION and not _dropout(operator, args, kwargs))
    return Policy.MUST_SAVE if kept else Policy.PREFER_RECOMPUTE


def _dropout(operator: Any, args: Sequence[Any], kwargs: Any) -> float:
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return float(given.get("dropout_p", 0.0))
