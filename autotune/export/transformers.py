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
        tf32 = said_of_tf32(found, wanted=bool(found["tf32"])) if "tf32" in found else {}
        return Export(
            json.dumps({**found, **unclipped, **optim, **device, **tf32}, indent=2),
            {**unsaid, **untold, **unknown_of_copies(result), **launching(result), **_one_gpu(result)},
        )


def said_of_tf32(said: Mapping[str, Any], *, wanted: bool, is_on: bool = False) -> dict[str, bool]:
    """`tf32` where it has to be said: a Trainer that compiles, not in fp16, switches TF32 on where it is told nothing of it, and any other
    leaves it as the process has it.

    Args:
        said: the other arguments.
        wanted: whether the answer trains in TF32.
        is_on: whether the process has it on already.
    """
    unasked = bool(said.get("torch_compile")) and not said.get("fp16")
    if wanted:
        return {} if unasked else {"tf32": True}
    return {"tf32": False} if unasked or is_on else {}


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
