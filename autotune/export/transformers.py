"""The answer as arguments of Hugging Face's `TrainingArguments`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autotune.export.base import (
    Export,
    Exporter,
    SearchedChoices,
    arguments,
    launching,
    unknown_of_copies,
    unsaid_clipping,
    unsaid_last_sample,
)
from autotune.records.config import Choice
from autotune.records.result import Result
from autotune.techniques import SPREAD, Technique, find_techniques
from autotune.techniques.frameworks import TRANSFORMERS, merge

_FUSED = "adamw_torch_fused"  # a Trainer's default with torch 2.8 and later


class Transformers(Exporter):
    """JSON that `HfArgumentParser.parse_json_file` and `TrainingArguments(**json.load(file))` take."""

    name = TRANSFORMERS
    summary = "arguments of Hugging Face's TrainingArguments as JSON"

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """One group of arguments for each key."""
        said, unsaid = arguments(result, space, (TRANSFORMERS,), "`TrainingArguments` has no argument for it")
        device = {"use_cpu": True} if result.subject.device.startswith("cpu") else {}
        places, found = result.places.get(SPREAD, {}), said[TRANSFORMERS]
        if result.subject.num_processes > 1 and SPREAD in result.places:
            device["ddp_find_unused_parameters"] = bool(places.get("find_unused_parameters"))
        if "fsdp" in found and places.get("classes"):
            found = merge(found, {"fsdp_config": {"transformer_layer_cls_to_wrap": places["classes"]}})
        unclipped = {"max_grad_norm": 0.0} if _trains_unclipped(result) else {}
        unsaid |= unsaid_clipping(result, "TrainingArguments(max_grad_norm=...), which clips to 1.0 otherwise")
        unsaid |= unsaid_last_sample(result, "TrainingArguments(dataloader_drop_last=True)")
        optim, untold = _users_adamw(result, found, space)
        return Export(
            json.dumps({**found, **unclipped, **optim, **device, **without_tf32(found)}, indent=2),
            {**unsaid, **untold, **unknown_of_copies(result), **launching(result), **_one_gpu(result)},
        )


def without_tf32(said: Mapping[str, Any]) -> dict[str, bool]:
    """`tf32` for a Trainer that compiles and is told nothing of it: it would switch TF32 on."""
    return {"tf32": False} if said.get("torch_compile") and said.get("tf32", True) is None else {}


def _one_gpu(result: Result) -> dict[str, str]:
    """How a Trainer is kept to the one GPU of the answer; nothing where several processes train, or the CPU does."""
    subject = result.subject
    if subject.num_processes > 1 or subject.device.startswith("cpu"):
        return {}
    return {
        "num_processes": "1: a Trainer takes a batch for each GPU that it sees; where there are several, let it see one alone, by "
        f"CUDA_VISIBLE_DEVICES (the answer is for {subject.device} of those that the search saw)"
    }


def _trains_unclipped(result: Result) -> bool:
    """Whether a model file is known not to clip gradients; what a `train_step` does inside is not known."""
    parts = result.subject.parts
    return bool(result.subject.model and parts) and not {"MAX_GRAD_NORM", "train_step"} & {*parts}


def _users_adamw(
    result: Result, said: Mapping[str, Any], space: SearchedChoices
) -> tuple[dict[str, str], dict[str, str]]:
    """`optim` for a model file's AdamW as the file makes it, or why it is not said; the fused one is a Trainer's default.

    Nothing where the task was built in Python: that may be of a Trainer, which has an `optim` of its own.
    """
    subject, (technique, fused) = result.subject, _fusing()
    by_file = bool(subject.model and subject.parts) and subject.optimizer == technique.said_of
    if not by_file or "optim" in said or result.config.get(technique.name) != technique.off:
        return {}, {}
    # the fused one is searched where the file's own optimizer is not fused already
    if "configure_optimizers" not in subject.parts or fused in space.get(technique.name, ()):
        return {"optim": "adamw_torch"}, {}
    why = f"a Trainer may take the fused one: give `optim` adamw_torch, or {_FUSED} where yours has fused=True"
    return {}, {technique.name: f"{technique.off}: {why}"}


def _fusing() -> tuple[Technique, Choice]:
    """The technique that has words for a Trainer's default, and which choice of it that is."""
    every = ((technique, choice) for technique in find_techniques().values() for choice in technique.choices)
    return next(
        one for one in every if one[0].write(TRANSFORMERS, one[1], optimizer=one[0].said_of) == {"optim": _FUSED}
    )
