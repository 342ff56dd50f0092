"""The answer as arguments of Hugging Face's `TrainingArguments`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from autotune.export.base import Export, Exporter
from autotune.records.config import Choice
from autotune.records.result import Result
from autotune.techniques import REGISTRY
from autotune.techniques.frameworks import BATCH, TRANSFORMERS

NO_WORDS = "`TrainingArguments` has no argument for it"


class Transformers(Exporter):
    """JSON that `HfArgumentParser.parse_json_file` and `TrainingArguments(**json.load(file))` take."""

    name: ClassVar[str] = TRANSFORMERS
    summary: ClassVar[str] = "arguments of Hugging Face's TrainingArguments as JSON"

    def export(self, result: Result, *, space: Mapping[str, Sequence[Choice]]) -> Export:
        """One group of arguments for each key; a technique that is off is said where the framework's default may differ."""
        arguments: dict[str, Any] = {}
        unsaid: dict[str, str] = {}
        for name, choice in result.config.items():
            technique = REGISTRY.get(name)
            searched = space.get(name, ())
            if name in BATCH:
                arguments |= BATCH[name][self.name].write(choice)
            elif technique is None:
                unsaid[name] = f"no technique of that name is installed here, so {choice!r} cannot be translated"
            elif (said := technique.write(self.name, choice, searched if len(searched) > 1 else ())) is not None:
                arguments |= said
            elif choice != technique.off:
                unsaid[name] = f"{technique.label(choice)}: {NO_WORDS}"
        return Export(json.dumps(arguments, indent=2), unsaid)
