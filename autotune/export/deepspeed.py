"""The answer as DeepSpeed's `ds_config.json`."""

from __future__ import annotations

import json

from autotune.export.base import Export, Exporter, SearchedChoices, arguments
from autotune.records.result import Result
from autotune.techniques.frameworks import DEEPSPEED

_UNSAID = "`ds_config.json` has no section that does the same"


class DeepSpeed(Exporter):
    """JSON for `deepspeed.initialize(config=...)` and for `TrainingArguments(deepspeed=...)`.

    The optimizer is left to the script, as it is when searching.
    """

    name = DEEPSPEED
    summary = "a ds_config.json for DeepSpeed"

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """One section or number for each key; DeepSpeed multiplies the batch by the number of processes itself."""
        said, unsaid = arguments(result, space, (DEEPSPEED,), _UNSAID)
        return Export(json.dumps(said[DEEPSPEED], indent=2), unsaid)
