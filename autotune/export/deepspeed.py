"""The answer as DeepSpeed's `ds_config.json`."""

from __future__ import annotations

import json

from autotune.export.base import (
    Export,
    Exporter,
    SearchedChoices,
    arguments,
    launching,
    unsaid_clipping,
    unsaid_last_sample,
)
from autotune.records.config import ACCUMULATION, BATCH_SIZE, BatchPlan, World
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
        """One section or number for each key. With the batch of all processes, DeepSpeed refuses another number of them."""
        said, unsaid = arguments(result, space, (DEEPSPEED,), _UNSAID)
        found, world = said[DEEPSPEED], World(size=result.subject.num_processes)
        plan = BatchPlan(int(result.config[BATCH_SIZE]), int(result.config[ACCUMULATION]), world)
        found["train_batch_size"] = plan.samples_per_step
        unsaid |= unsaid_clipping(result, "`gradient_clipping`")
        unsaid |= unsaid_last_sample(result)
        return Export(json.dumps(found, indent=2), {**unsaid, **launching(result)})
