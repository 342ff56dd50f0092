"""The answer as arguments of Hugging Face's `TrainingArguments`."""

from __future__ import annotations

import json

from autotune.export.base import Export, Exporter, SearchedChoices, arguments
from autotune.records.result import Result
from autotune.techniques.frameworks import TRANSFORMERS


class Transformers(Exporter):
    """JSON that `HfArgumentParser.parse_json_file` and `TrainingArguments(**json.load(file))` take."""

    name = TRANSFORMERS
    summary = "arguments of Hugging Face's TrainingArguments as JSON"

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """One group of arguments for each key."""
        said, unsaid = arguments(result, space, (TRANSFORMERS,), "`TrainingArguments` has no argument for it")
        device = {"use_cpu": True} if result.subject.device.startswith("cpu") else {}
        return Export(json.dumps({**said[TRANSFORMERS], **device}, indent=2), unsaid)
