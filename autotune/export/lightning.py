"""The answer as arguments of Lightning's `Trainer` and of the dataloaders that a user gives it."""

from __future__ import annotations

import json

from autotune.export.base import Export, Exporter, SearchedChoices, arguments
from autotune.records.result import Result
from autotune.techniques.frameworks import DATALOADER, LIGHTNING


class Lightning(Exporter):
    """JSON with two objects: `Trainer(**said["trainer"])` and `DataLoader(dataset, **said["dataloader"])`."""

    name = LIGHTNING
    summary = "arguments of Lightning's Trainer and of a DataLoader as JSON"

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """One group of arguments for each key."""
        said, unsaid = arguments(
            result, space, (LIGHTNING, DATALOADER), "neither `Trainer` nor `DataLoader` has an argument for it"
        )
        return Export(json.dumps({"trainer": said[LIGHTNING], "dataloader": said[DATALOADER]}, indent=2), unsaid)
