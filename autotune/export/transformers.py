"""The answer as arguments of Hugging Face's `TrainingArguments`."""

from __future__ import annotations

import json

from autotune.export.base import (
    Export,
    Exporter,
    SearchedChoices,
    arguments,
    launching,
    unknown_of_copies,
    unsaid_clipping,
)
from autotune.records.result import Result
from autotune.techniques import SPREAD
from autotune.techniques.frameworks import TRANSFORMERS, merge


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
        unsaid |= unsaid_clipping(result, "TrainingArguments(max_grad_norm=...), which clips to 1.0 otherwise")
        return Export(
            json.dumps({**found, **device}, indent=2), {**unsaid, **unknown_of_copies(result), **launching(result)}
        )
