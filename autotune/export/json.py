"""The config as JSON, which `--config FILE` and `autotune.prepare` take."""

from __future__ import annotations

import json

from autotune.export.base import Export, Exporter, SearchedChoices, launching, unsaid_eval_batch
from autotune.records.result import Result


class Json(Exporter):
    """Every key of the config, those that are off included."""

    name = "json"
    summary = "the config dict as JSON, for `--config FILE`"
    says_any_config = True

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """The config, a key a line."""
        return Export(json.dumps(result.config, indent=2), {**unsaid_eval_batch(result), **launching(result)})
