"""The config as JSON, which `--config FILE` and `autotune.prepare` take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

from autotune.export.base import Export, Exporter
from autotune.records.config import Choice
from autotune.records.result import Result


class Json(Exporter):
    """Every key of the config, those that are off included."""

    name: ClassVar[str] = "json"
    summary: ClassVar[str] = "the config dict as JSON, for `--config FILE`"

    def export(self, result: Result, *, space: Mapping[str, Sequence[Choice]]) -> Export:
        """The config, a key a line."""
        return Export(json.dumps(result.config, indent=2))
