"""The config as YAML, for recipes of any kind."""

from __future__ import annotations

import json

from autotune.export.base import Export, Exporter, SearchedChoices, launching, unsaid_eval_batch
from autotune.records.result import Result


class Yaml(Exporter):
    """A line a key. Words are quoted: YAML 1.1 takes a bare `off` for False."""

    name = "yaml"
    summary = "the config dict as YAML, for recipes of any kind"
    says_any_config = True

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """Every key of the config, those that are off included. JSON's scalars are YAML's, too."""
        lines = [f"{name}: {json.dumps(choice)}" for name, choice in result.config.items()]
        return Export("\n".join(lines), {**unsaid_eval_batch(result), **launching(result)})
