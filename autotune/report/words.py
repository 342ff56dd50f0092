"""A config as text to paste."""

from __future__ import annotations

import json

from autotune.records.batch_plan import BATCH_KEYS
from autotune.records.config import Choice
from autotune.report.sections import Code
from autotune.techniques import REGISTRY
from autotune.techniques.labels import AnyConfig, as_dict


def essentials(config: AnyConfig) -> dict[str, Choice]:
    """The keys that `autotune.prepare` needs to build the same config: the batch, and every technique that is not off."""
    return {
        name: choice
        for name, choice in as_dict(config).items()
        if name in BATCH_KEYS or name not in REGISTRY or choice != REGISTRY[name].off
    }


def as_code(config: AnyConfig, head: str = "") -> Code:
    """`head` and the config's essentials as a dict literal of Python."""
    literals = {
        name: json.dumps(choice) if isinstance(choice, str) else repr(choice)
        for name, choice in essentials(config).items()
    }
    return Code(f"{head}{{", tuple(f'"{name}": {literal}' for name, literal in literals.items()), "}")


def as_json(config: AnyConfig) -> str:
    """The config's essentials as one line of JSON, for `--config`."""
    return json.dumps(essentials(config))
